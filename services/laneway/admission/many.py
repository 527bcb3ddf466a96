"""SubmitMany: many jobs over one call. Owns the window, what is read and answered when, and how the call ends.

Knows nothing of what becomes of an item: it is accepted by work that outlives the call, as is right for jobs whose
result is collected later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import grpc.aio
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from laneway.admission.chores import Chores
from laneway.core.errors import InvalidRequest, LanewayError, Unavailable
from laneway.runtime.grpc_edge import known_or_logged
from laneway.runtime.grpc_errors import to_status
from laneway.runtime.wire import checks
from laneway.v1 import admission_pb2 as pb

WINDOW = 256  # items of a call that are worked on at once
WINDOW_BYTES = 1024 * 1024  # and how large they may be together; one more is always taken
REF_CHARACTERS_MAX = 128
DRAINING_RETRY_S = 1.0
METHOD = "SubmitMany"
_ITEMS = pb.SubmitManyRequest.ITEMS_FIELD_NUMBER
_REF = pb.SubmitManyItem.CLIENT_REF_FIELD_NUMBER

Context = grpc.aio.ServicerContext[bytes, pb.SubmitManyResponse]
Submit = Callable[[pb.SubmitManyItem], Awaitable[pb.SubmitResponse]]


class ManyCall:
    """One call. `submit` raises a LanewayError for a refused item; nobody cancels it."""

    def __init__(self, context: Context, submit: Submit, chores: Chores, draining: asyncio.Event) -> None:
        self._context = context
        self._submit = submit
        self._chores = chores
        self._draining = draining
        self._open: dict[str, int] = {}  # by client_ref: the size of an item without an outcome
        self._open_bytes = 0
        self._outcomes: list[pb.SubmitManyOutcome] = []  # made and not yet written
        self._unwritten = 0  # outcomes that still count in the window
        self._made = asyncio.Event()
        self._freed = asyncio.Event()
        self._all_read = False

    async def run(self) -> None:
        """Returns when every item that was read has its outcome at the caller; Unavailable where more may come."""
        await self._context.write(pb.SubmitManyResponse(window=WINDOW))
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write())
            reading = group.create_task(self._read())
            stopping = group.create_task(self._stop(reading))
            await asyncio.wait({reading})
            stopping.cancel()
            self._all_read = True
            self._made.set()
        if reading.cancelled():
            raise Unavailable(
                "this door is shutting down; send the items without an outcome again, with their keys",
                reason="DRAINING",
                retry_after_s=DRAINING_RETRY_S,
            )

    async def _stop(self, reading: asyncio.Task[None]) -> None:
        await self._draining.wait()
        reading.cancel()

    async def _read(self) -> None:
        while isinstance(data := await self._context.read(), bytes):  # not EOF
            for item, size in _items(data):
                while self._full():
                    self._freed.clear()
                    await self._freed.wait()
                self._begin(item, size)

    def _full(self) -> bool:
        return len(self._open) + self._unwritten >= WINDOW or self._open_bytes >= WINDOW_BYTES

    # --- one item ------------------------------------------------------------------------------------

    def _begin(self, item: pb.SubmitManyItem, size: int) -> None:
        ref = item.client_ref
        try:
            if not size:
                raise InvalidRequest(
                    "the item is malformed: no SubmitManyItem, or a string in it is not UTF-8",
                    reason="MALFORMED_REQUEST",
                )
            _check_ref(ref)
            if ref in self._open:
                checks.refuse("client_ref", "is that of another item of this call", reason="CLIENT_REF_IN_USE")
        except LanewayError as error:
            self._outcome(pb.SubmitManyOutcome(client_ref=ref, error=to_status(error)))
            return
        self._open[ref] = size
        self._open_bytes += size
        self._chores.start(self._settle(item), "submit one of many")

    async def _settle(self, item: pb.SubmitManyItem) -> None:
        ref = item.client_ref
        try:
            outcome = pb.SubmitManyOutcome(client_ref=ref, accepted=await self._submit(item))
        except Exception as error:  # noqa: BLE001 - the edge of an item: each error becomes its status
            outcome = pb.SubmitManyOutcome(client_ref=ref, error=to_status(known_or_logged(METHOD, error)))
        self._open_bytes -= self._open.pop(ref)
        self._outcome(outcome)

    # --- outcomes ------------------------------------------------------------------------------------

    def _outcome(self, outcome: pb.SubmitManyOutcome) -> None:
        self._outcomes.append(outcome)
        self._unwritten += 1
        self._made.set()

    async def _write(self) -> None:
        """Whatever is there goes into one response: under load, writes are what costs."""
        while True:
            self._made.clear()
            outcomes, self._outcomes = self._outcomes, []
            if outcomes:
                await self._context.write(pb.SubmitManyResponse(outcomes=outcomes))
                self._unwritten -= len(outcomes)
                self._freed.set()
            elif self._all_read and not self._open:
                return
            else:
                await self._made.wait()


def _items(data: bytes) -> Iterator[tuple[pb.SubmitManyItem, int]]:
    """The items of a request and their sizes; 0 for one that is malformed."""
    try:
        request = pb.SubmitManyRequest.FromString(data)
    except DecodeError:
        yield from _items_one_by_one(data)
        return
    checks.no_unknown_fields(request, "request")
    for item in request.items:
        yield item, item.ByteSize() or 1


def _items_one_by_one(data: bytes) -> Iterator[tuple[pb.SubmitManyItem, int]]:
    """Of a request that does not parse as a whole: one bad item must not spoil the others."""
    for number, content in _fields(data):
        if number != _ITEMS:
            raise InvalidRequest(f"the request has the unknown field {number}", field="request", reason="UNKNOWN_FIELD")
        try:
            yield pb.SubmitManyItem.FromString(content), len(content) or 1
        except DecodeError:
            yield pb.SubmitManyItem(client_ref=_ref_of(content)), 0


def _ref_of(data: bytes) -> str:
    """The name of an item that does not parse, if it has one."""
    try:
        return "".join([content.decode() for number, content in _fields(data) if number == _REF][-1:])
    except (InvalidRequest, UnicodeDecodeError):
        return ""


def _fields(data: bytes) -> list[tuple[int, bytes]]:
    """Numbers and contents of a message's fields, whatever they hold; those without a length are left out."""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        raise InvalidRequest("the request is malformed: no SubmitManyRequest", reason="MALFORMED_REQUEST") from None
    known = [fields[i] for i in range(len(fields))]
    return [(field.field_number, field.data) for field in known if isinstance(field.data, bytes)]


def _check_ref(ref: str) -> None:
    if not 1 <= len(ref) <= REF_CHARACTERS_MAX:
        checks.refuse("client_ref", f"must have 1 to {REF_CHARACTERS_MAX} characters")
