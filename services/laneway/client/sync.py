"""The same clients for programs without an event loop: scripts, notebooks, threads.

    from laneway.client.sync import Client

    with Client("127.0.0.1:7070") as client:
        with client.generate(model="chat", messages=[{"role": "user", "content": "Hi"}]) as stream:
            for chunk in stream:
                print(chunk.text, end="")
        print(stream.finished.usage)

Decides nothing: each method runs the async client's method of the same name on a loop in the background, one thread
for each client, where its callbacks are called too. Names, parameters and words are the async client's, which a test
holds. Threads may share a client; Ctrl-C ends the call that it interrupts. Values and errors are those of
laneway.client.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Unpack

from laneway.client import admission, operators
from laneway.client.background import ClientClosed
from laneway.client.many import ManyItem, ManyOutcome
from laneway.client.request import RequestFields
from laneway.client.sync_connection import Items, SyncConnection, TokenStream
from laneway.client.values import (
    Cancelled,
    DeadLetter,
    Explanation,
    Job,
    LaneStatus,
    Model,
    Quote,
    Region,
    Route,
    Submitted,
    Worker,
)
from laneway.core.fleet import Plan
from laneway.core.lanes import JobState, Lane

__all__ = ["Client", "ClientClosed", "Items", "RoutingClient", "SchedulerClient", "TokenStream"]


class Client(SyncConnection[admission.Client]):
    """Runs jobs. `with Client("127.0.0.1:7070") as client: ...`; one client serves many concurrent calls."""

    _kind = admission.Client

    def generate(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> TokenStream:
        """An answer as a stream: `with client.generate(model="chat", prompt="Hi") as stream`.

        Entering waits for the verdict and raises a refusal. `timeout_s` bounds the whole call, waits between attempts
        included; the job's deadline becomes the earlier of it and the contract's. No attempt to run the job begins
        later than `retry_s_max` after the call; 0: one attempt. Leaving the block ends the call.
        """
        source = self._client.generate(
            idempotency_key=idempotency_key, timeout_s=timeout_s, retry_s_max=retry_s_max, **request
        )
        return TokenStream(self._background, source)

    def submit(
        self,
        *,
        idempotency_key: str | None = None,
        timeout_s: float | None = None,
        retry_s_max: float | None = None,
        **request: Unpack[RequestFields],
    ) -> Submitted:
        """Leaves a job whose result is collected later, by watch() or wait(). `timeout_s` bounds only this call;
        `retry_s_max` as in generate()."""
        return self._run(
            self._client.submit(
                idempotency_key=idempotency_key, timeout_s=timeout_s, retry_s_max=retry_s_max, **request
            )
        )

    def submit_many(
        self, items: Iterable[ManyItem] | AsyncIterable[ManyItem], *, retry_s_max: float = admission.MANY_RETRY_S_MAX
    ) -> Items[ManyOutcome]:
        """Leaves many jobs over one call: `for outcome in client.submit_many(items)`, in the order of outcomes.

        Items are taken as there is room for them. A refused one is an outcome and ends nothing; where the service says
        when to come again, it is sent again for up to `retry_s_max`. A lost call is taken up again, and what had no
        outcome is sent again with its key, until nothing was heard for `RetryParams.outage_s_max`. Close the iterator
        (contextlib.closing) to end the call; what was accepted stays accepted.
        """
        return self._items(self._client.submit_many(items, retry_s_max=retry_s_max))

    def watch(
        self,
        job_id: str,
        *,
        from_index: int = 0,
        delivered_ids: Sequence[int] = (),
        timeout_s: float | None = None,
    ) -> TokenStream:
        """Follows a job from a token index, while it runs or after it ended. Leaving the block never touches the job.

        `delivered_ids`: all tokens before `from_index`, where the caller has them: should the job go on in another run
        than the one that gave them, the stream ends with Aborted, and is no mixture of two answers.

        A lost connection is taken up again where it broke, until nothing was heard for `RetryParams.outage_s_max`. The
        end of a job that did not succeed raises its error.
        """
        watched = self._client.watch(job_id, from_index=from_index, delivered_ids=delivered_ids, timeout_s=timeout_s)
        return TokenStream(self._background, watched)

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """The job once it has ended, whatever its end; DeadlineExceeded if that takes longer than `timeout_s`.

        Outlasts a door that is away as watch() does.
        """
        return self._run(self._client.wait(job_id, timeout_s=timeout_s))

    def get_job(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """A job as it stands, with its result if it has one."""
        return self._run(self._client.get_job(job_id, timeout_s=timeout_s))

    def list_jobs(
        self,
        *,
        lane: Lane | None = None,
        state: JobState | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Items[Job]:
        """The caller's jobs without results, those that changed last first; `timeout_s` bounds each page."""
        return self._items(
            self._client.list_jobs(lane=lane, state=state, labels=labels, limit=limit, timeout_s=timeout_s)
        )

    def cancel(self, job_id: str, *, timeout_s: float | None = None) -> Cancelled:
        """Cancels a job in any state; the answer tells where that left it."""
        return self._run(self._client.cancel(job_id, timeout_s=timeout_s))

    def quote(self, *, timeout_s: float | None = None, **request: Unpack[RequestFields]) -> Quote:
        """What would happen to a request, without running it. A refusal is a quote too."""
        return self._run(self._client.quote(timeout_s=timeout_s, **request))

    def list_dead_letters(
        self,
        *,
        lane: Lane | None = None,
        reason: str = "",
        tenant: str = "",
        limit: int | None = None,
        timeout_s: float | None = None,
    ) -> Items[DeadLetter]:
        """Jobs that were given up, newest first: the caller's own, or for operators those of every tenant, or of
        `tenant`. `timeout_s` bounds each page."""
        return self._items(
            self._client.list_dead_letters(lane=lane, reason=reason, tenant=tenant, limit=limit, timeout_s=timeout_s)
        )

    def requeue_dead_letter(
        self, job_id: str, *, deadline_s: float | None = None, timeout_s: float | None = None
    ) -> Submitted:
        """Runs a job that was given up again, as a new job to be collected later, and removes its dead letter. The
        answer is due `deadline_s` from now; by default after as long as the old one had. Repeated, it gives the same
        new job; a refusal leaves the letter."""
        return self._run(self._client.requeue_dead_letter(job_id, deadline_s=deadline_s, timeout_s=timeout_s))

    def purge_dead_letters(
        self,
        job_ids: Sequence[str] | None = None,
        *,
        lane: Lane | None = None,
        reason: str = "",
        tenant: str = "",
        before_s: float | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Removes dead letters for good and returns how many: those of `job_ids`, or where that is None all that match
        the rest, which may be every one that the caller sees. `before_s`: given up before that time, Unix seconds.
        Without a `timeout_s` it may take two minutes."""
        return self._run(
            self._client.purge_dead_letters(
                job_ids, lane=lane, reason=reason, tenant=tenant, before_s=before_s, timeout_s=timeout_s
            )
        )


class SchedulerClient(SyncConnection[operators.SchedulerClient]):
    """Workers, lanes, models, the plan, and why a job is where it is."""

    _kind = operators.SchedulerClient

    def get_plan(self, *, timeout_s: float | None = None) -> Plan:
        return self._run(self._client.get_plan(timeout_s=timeout_s))

    def watch_plan(self, *, timeout_s: float | None = None) -> Items[Plan]:
        """The current plan, then each new one. Close the iterator (contextlib.closing) to end the call."""
        return self._items(self._client.watch_plan(timeout_s=timeout_s))

    def list_workers(self, *, pool: str = "", timeout_s: float | None = None) -> Items[Worker]:
        return self._items(self._client.list_workers(pool=pool, timeout_s=timeout_s))

    def list_lanes(self, *, timeout_s: float | None = None) -> Items[LaneStatus]:
        return self._items(self._client.list_lanes(timeout_s=timeout_s))

    def list_models(self, *, timeout_s: float | None = None) -> Items[Model]:
        return self._items(self._client.list_models(timeout_s=timeout_s))

    def explain_job(self, job_id: str, *, timeout_s: float | None = None) -> Explanation:
        return self._run(self._client.explain_job(job_id, timeout_s=timeout_s))

    def pause_lane(self, lane: Lane, *, timeout_s: float | None = None) -> None:
        """Stops releases and pulls of a lane; admission goes on to hold."""
        return self._run(self._client.pause_lane(lane, timeout_s=timeout_s))

    def resume_lane(self, lane: Lane, *, timeout_s: float | None = None) -> None:
        return self._run(self._client.resume_lane(lane, timeout_s=timeout_s))

    def drain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> None:
        """Lets a worker (incarnation or name) finish what it runs and take nothing new."""
        return self._run(self._client.drain_worker(worker_id, timeout_s=timeout_s))

    def undrain_worker(self, worker_id: str, *, timeout_s: float | None = None) -> None:
        return self._run(self._client.undrain_worker(worker_id, timeout_s=timeout_s))


class RoutingClient(SyncConnection[operators.RoutingClient]):
    """Regions: what they look like, which one a request should run in, and draining them."""

    _kind = operators.RoutingClient

    def route(
        self,
        model: str,
        *,
        lane: Lane = Lane.PRIORITY,
        regions: Sequence[str] = (),
        prompt_tokens: int = 0,
        max_tokens: int = 0,
        timeout_s: float | None = None,
    ) -> Route:
        return self._run(
            self._client.route(
                model,
                lane=lane,
                regions=regions,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                timeout_s=timeout_s,
            )
        )

    def list_regions(self, *, timeout_s: float | None = None) -> Items[Region]:
        return self._items(self._client.list_regions(timeout_s=timeout_s))

    def watch_regions(self, *, timeout_s: float | None = None) -> Items[tuple[Region, ...]]:
        """The current digests, then each change. Close the iterator (contextlib.closing) to end the call."""
        return self._items(self._client.watch_regions(timeout_s=timeout_s))

    def drain_region(self, region: str, *, timeout_s: float | None = None) -> None:
        """Keeps new work out of a region; what it accepted goes on."""
        return self._run(self._client.drain_region(region, timeout_s=timeout_s))

    def undrain_region(self, region: str, *, timeout_s: float | None = None) -> None:
        return self._run(self._client.undrain_region(region, timeout_s=timeout_s))
