"""What a worker tells Prometheus: counts of what happened, and gauges that are recounts of what is live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Protocol

from laneway.core.job import TAKEOVER
from laneway.core.lanes import Lane
from laneway.policy.release import ReleaseReason
from laneway.policy.stealing import StealReason
from laneway.runtime import metrics
from laneway.runtime.puller import FIRED, LANE

RUNS = metrics.counter(
    "laneway_worker_deliveries_total", "Deliveries by what became of them", ["pool", "lane", "outcome"]
)
TOKENS = metrics.counter("laneway_worker_output_tokens", "Tokens of finished answers", ["pool", "lane"])
PREEMPTIONS = metrics.counter(
    "laneway_worker_preemptions_total",
    "Runs that yielded, by what was short",
    ["pool", "lane", "reason"],
)
KV_OUTGROWN = metrics.counter(
    "laneway_worker_kv_outgrown_total",
    "Times that answers outgrew their prediction and the KV, and none could yield: the engine evicts one and computes "
    "it again",
    ["pool"],
)
PREFILL = metrics.histogram("laneway_worker_prefill_seconds", "From submission to the first token", ["pool", "lane"])
PROTECTED = metrics.counter(
    "laneway_worker_protected_seconds", "Time in which the interference budget holds lower-lane prompts back", ["pool"]
)
GRANTED = metrics.counter(
    "laneway_worker_lower_granted_tokens", "Prompt tokens that it paid out to the lower lanes meanwhile", ["pool"]
)
SHARED = metrics.counter(
    "laneway_worker_shared_total", "Jobs that joined the sequence of an identical one", ["pool", "lane"]
)
CLAIMS = metrics.counter(
    "laneway_worker_claims_total", "Jobs taken, by why: released, fired, stolen, taken over", ["pool", "lane", "reason"]
)
PROVIDER_GRANTS = metrics.counter(
    "laneway_provider_grants_total", "Requests that were let through to a provider", ["pool"]
)
PROVIDER_RETRIES = metrics.counter(
    "laneway_provider_retries_total", "Requests that a provider refused or failed at: paid for again, or given up",
    ["pool", "outcome"],
)  # fmt: skip
PROVIDER_WRITES = metrics.counter(
    "laneway_provider_writes_total", "Writes of quota records: stored, or lost against another worker's",
    ["pool", "outcome"],
)  # fmt: skip
PROVIDER_WAIT = metrics.histogram("laneway_provider_wait_seconds", "From a request to its leave", ["pool"])
DROPPED = metrics.counter("laneway_worker_messages_dropped_total", "Token messages that could not be sent", ["pool"])
SLICES = metrics.counter(
    "laneway_worker_prompt_slices_total", "Slices of long prompts sent ahead of them", ["pool", "lane"]
)
GATE_CLOSED = metrics.counter(
    "laneway_worker_gate_closed_total", "Times that no lower-lane job could start any more, by what was in the way",
    ["pool", "reason"],
)  # fmt: skip
RESUMED = metrics.counter(
    "laneway_worker_resumed_tokens", "Tokens that earlier attempts had computed and this worker went on from",
    ["pool", "lane"],
)  # fmt: skip
RECOMPUTED = metrics.counter(
    "laneway_worker_recomputed_tokens", "Tokens that earlier attempts are known to have computed, computed once more",
    ["pool", "lane"],
)  # fmt: skip
CHECKPOINT_BYTES = metrics.counter("laneway_worker_checkpoint_bytes", "Checkpoints that were sent", ["pool"])
DEAD_LETTERS = metrics.counter("laneway_dead_letters_total", "Jobs that were given up", ["lane", "reason"])
DEAD_LETTERS_LOST = metrics.counter(
    "laneway_dead_letters_lost_total", "Dead letters that could not be kept", ["lane", "reason"]
)


_CLAIM_REASONS = frozenset({*ReleaseReason, *StealReason, LANE, FIRED, TAKEOVER})


def count_claim(pool: str, lane: Lane, reason: str) -> None:
    """`reason`: as the message's headers have it, so it may be anything."""
    CLAIMS.labels(pool, lane.value, reason if reason in _CLAIM_REASONS else "OTHER").inc()


class Live(Protocol):
    """What gauges are computed from. Called on the scrape's thread: these only look."""

    def running_by_lane(self) -> Mapping[Lane, int]: ...

    def staged_by_lane(self) -> Mapping[Lane, int]: ...

    def kv_tokens(self) -> tuple[int, int]:
        """Reserved, and all."""
        ...

    def slots(self) -> int: ...

    def ready_workers(self) -> int:
        """1 while its engine is ready, 0 while there is none."""
        ...

    def interference(self) -> Mapping[str, float]:
        """Credit in tokens, theta, and the share of a step's prompt that priority takes."""
        ...


@contextmanager
def gauges(pool: str, live: Live) -> Iterator[None]:
    """Shows the live sets while open."""

    def by_lane(counts: Mapping[Lane, int]) -> Iterable[metrics.Sample]:
        return [({"pool": pool, "lane": lane.value}, float(count)) for lane, count in counts.items()]

    def one(value: float) -> Iterable[metrics.Sample]:
        return [({"pool": pool}, value)]

    with ExitStack() as stack:
        for name, text, labels, read in (
            ("laneway_worker_running_jobs", "Jobs with a seat in the engine", ("pool", "lane"),
             lambda: by_lane(live.running_by_lane())),
            ("laneway_worker_staged_jobs", "Jobs pulled and waiting for KV", ("pool", "lane"),
             lambda: by_lane(live.staged_by_lane())),
            ("laneway_worker_kv_reserved_tokens", "KV reserved by running jobs", ("pool",),
             lambda: one(live.kv_tokens()[0])),
            ("laneway_worker_kv_capacity_tokens", "KV of the engine", ("pool",), lambda: one(live.kv_tokens()[1])),
            ("laneway_worker_capacity_slots", "Sequences that the engine can hold", ("pool",),
             lambda: one(live.slots())),
            ("laneway_ready_workers", "1 while its engine can be sent work, else 0", ("pool",),
             lambda: one(live.ready_workers())),
            ("laneway_worker_credit_tokens", "Prompt tokens that lower lanes may submit now; below 0: debt", ("pool",),
             lambda: one(live.interference()["credit"])),
            ("laneway_worker_theta_ratio", "Share of TPOT targets that priority work may be brought to", ("pool",),
             lambda: one(live.interference()["theta"])),
            ("laneway_worker_priority_prefill_ratio", "Share of steps' prompt tokens that priority takes", ("pool",),
             lambda: one(live.interference()["phi_priority"])),
        ):  # fmt: skip
            stack.enter_context(metrics.live_gauge(name, text, labels, read))
        yield
