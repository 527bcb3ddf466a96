"""Dead letters as their owners see them: listing, purging, running a job again, each within the caller's own tenant.

Another tenant's letter is not found. Operators see and touch all of them. To requeue is to submit what the letter holds
as its tenant would: the same checks, the same verdict, the same way into the lane. Nothing is accepted here that the
front door would refuse.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Sequence

from msgspec.structs import replace

from laneway.admission.application import Admission, Request
from laneway.admission.chores import Chores
from laneway.core import ids
from laneway.core.catalogue import Catalogue
from laneway.core.clock import Clock
from laneway.core.dead_letters import DeadLetter
from laneway.core.errors import (
    DeadLetterNotFound,
    InvalidRequest,
    JobNotFound,
    NotRequeueable,
    ObjectLost,
    PermissionDenied,
)
from laneway.core.job import JobRecord
from laneway.runtime.auth import Caller
from laneway.runtime.bus import BusError
from laneway.runtime.dead_letters import DeadLetterFilter, DeadLetterStore
from laneway.runtime.live_policy import LivePolicy
from laneway.runtime.logging import get_logger
from laneway.runtime.paging import make_token, page_size_of, read_token
from laneway.runtime.references import References
from laneway.runtime.walking import Place
from laneway.runtime.wire.contracts import DEADLINE_S_MAX
from laneway.runtime.wire.dead_letters import requeue_spec
from laneway.runtime.wire.reading import UnreadableMessage
from laneway.runtime.wire.requests import ParsedSpec, parse_spec

log = get_logger("laneway.admission.dead_letters")


class DeadLetters:
    def __init__(
        self,
        region: str,
        store: DeadLetterStore,
        admission: Admission,
        references: References,
        catalogue: Catalogue,
        policy: LivePolicy,
        chores: Chores,
        clock: Clock,
    ) -> None:
        self._region = region
        self._store = store
        self._admission = admission
        self._references = references
        self._catalogue = catalogue
        self._policy = policy
        self._chores = chores
        self._clock = clock

    # --- looking -------------------------------------------------------------------------------------

    async def page(
        self, caller: Caller, wanted: DeadLetterFilter, page_size: int, page_token: str
    ) -> tuple[list[DeadLetter], str]:
        """A page of what the caller may see, given up last first, and the token of the next page."""
        size = page_size_of(page_size)
        wanted = _within(caller, wanted)
        key = json.dumps(["ListDeadLetters", wanted.tenant, wanted.lane, wanted.reason])
        place = _place(read_token(page_token, key)) if page_token else None
        page, place = await self._store.page(wanted, place, size)
        return page, make_token(str(place), key) if place is not None else ""

    async def _find(self, caller: Caller, job_id: str, *, listed: bool = False) -> DeadLetter | None:
        try:
            letter = await self._store.get(job_id, listed=listed)
        except UnreadableMessage as error:
            log.warning("dead_letter_unreadable", job_id=job_id, error=str(error))
            return None
        if letter is None or not (caller.role == "operator" or letter.record.tenant == caller.tenant):
            return None
        return letter

    # --- running again -------------------------------------------------------------------------------

    async def requeue(self, caller: Caller, job_id: str, deadline_s: float | None) -> JobRecord:
        """The record of the job that runs this one again; the same one however often it is asked for.

        `deadline_s`: of the new job, Unix seconds; None: as far ahead as the old one had at its acceptance. A refusal
        leaves the letter where it is. Raises DeadLetterNotFound, NotRequeueable, and what a submission may raise.
        """
        letter = await self._find(caller, job_id)
        if letter is None:
            return await self._requeued_before(caller, job_id)
        request = await self._request(letter, deadline_s)
        owner = replace(caller, tenant=letter.record.tenant)
        # A caller who stops waiting does not stop it between the acceptance and the end of the letter.
        return await asyncio.shield(self._chores.start(self._requeue(owner, job_id, request), f"requeue {job_id}"))

    async def _requeue(self, owner: Caller, job_id: str, request: Request) -> JobRecord:
        try:
            record = await self._admission.submit_here(owner, request)
        except InvalidRequest as error:  # of the job as it was, and not of what this caller sent
            raise _not_requeueable(job_id, error) from error
        log.info("dead_letter_requeued", job_id=job_id, requeued_as=record.job_id, tenant=owner.tenant)
        try:
            await self._store.remove(job_id)
        except BusError as error:  # asking again finds the same job, and removes the letter then
            log.warning("dead_letter_not_removed", job_id=job_id, error=error.message)
        return record

    async def _requeued_before(self, caller: Caller, job_id: str) -> JobRecord:
        """What an earlier call came to: it removed the letter, and its answer may have been lost."""
        tenant = caller.tenant
        with contextlib.suppress(JobNotFound):  # its record has expired; the new one need not have
            tenant = (await self._admission.book.find(caller, job_id)).record.tenant
        record = await self._admission.book.earlier(tenant, ids.requeued_job_id(self._region, tenant, job_id))
        if record is None:
            raise DeadLetterNotFound("there is no dead letter of this job", job_id=job_id)
        return record

    async def _request(self, letter: DeadLetter, deadline_s: float | None) -> Request:
        record = letter.record
        if letter.job is None:
            raise NotRequeueable("the stored job cannot be read, so it cannot be run again", job_id=record.job_id)
        try:
            task = (await self._references.job(letter.job)).task
        except ObjectLost as error:
            raise NotRequeueable(f"its prompt is not kept any more: {error.message}", job_id=record.job_id) from error
        now_s = self._clock.now()
        due_s = now_s + min(letter.span_s, DEADLINE_S_MAX) if deadline_s is None else deadline_s
        try:
            spec = parse_spec(
                requeue_spec(record, task, due_s), self._catalogue, now_s, self._policy.settings, attached=False
            )
        except InvalidRequest as error:
            raise _not_requeueable(record.job_id, error) from error
        return Request(
            spec=self._same_tokens(letter, spec),
            # Another deadline is no other request: whoever asks again gets the job that there is.
            digest=hashlib.sha256(f"requeue {record.job_id}".encode()).digest(),
            job_id=ids.requeued_job_id(self._region, record.tenant, record.job_id),
            requeued_from=record.job_id,
        )

    def _same_tokens(self, letter: DeadLetter, spec: ParsedSpec) -> ParsedSpec:
        """For the pools that read the prompt's token ids as the one did for which they were made."""
        pool = self._catalogue.pool(letter.record.pool)
        alike = tuple(each for each in spec.pools if pool is not None and each.tokenizer == pool.tokenizer)
        if not alike:
            message = f"no pool of its model has the tokenizer of pool {letter.record.pool}, which made its token ids"
            raise NotRequeueable(message, job_id=letter.record.job_id)
        return replace(spec, pools=alike)

    # --- removing ------------------------------------------------------------------------------------

    async def purge(self, caller: Caller, wanted: DeadLetterFilter) -> int:
        """Removes what matches, and returns how many that were."""
        purged = await self._store.purge(_within(caller, wanted))
        log.info("dead_letters_purged", count=purged, by=caller.tenant)
        return purged

    async def purge_jobs(self, caller: Caller, job_ids: Sequence[str]) -> int:
        """Removes the letters of these jobs; those that are not there, or not the caller's, count for nothing."""
        purged = 0
        for job_id in dict.fromkeys(job_ids):
            if caller.role == "operator" or await self._find(caller, job_id, listed=True) is not None:
                purged += await self._store.remove(job_id)
        log.info("dead_letters_purged", count=purged, by=caller.tenant)
        return purged


def _within(caller: Caller, wanted: DeadLetterFilter) -> DeadLetterFilter:
    """What is asked for, within what the caller may see."""
    if caller.role == "operator":
        return wanted
    if wanted.tenant not in ("", caller.tenant):
        raise PermissionDenied("only operators may name another tenant", reason="OPERATOR_ONLY", field="tenant")
    return replace(wanted, tenant=caller.tenant)


def _not_requeueable(job_id: str, error: InvalidRequest) -> NotRequeueable:
    return NotRequeueable(
        f"the job would not be accepted today: {error.message}", job_id=job_id, facts={"cause": error.reason}
    )


def _place(after: str) -> Place:
    try:
        return Place.parse(after)
    except ValueError:
        raise InvalidRequest("page_token was not given by this service", field="page_token") from None
