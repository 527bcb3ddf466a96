"""What the reasons of the scheduler and of workers mean, in words for people. A reason that is missing here is shown
as it is."""

from __future__ import annotations

from laneway.core.job import TAKEOVER
from laneway.policy.release import HoldReason, ReleaseReason
from laneway.policy.stealing import StealReason
from laneway.runtime.puller import FIRED, LANE

WORDS: dict[str, str] = {
    # released by the scheduler
    ReleaseReason.IDLE_CAPACITY: "a place of the pool would have stayed empty",
    ReleaseReason.READY_SHORT: "the pool would have run dry before the next look",
    ReleaseReason.PRICE_LOW: "little priority work is expected now, so this is as good a time as any before it is due",
    ReleaseReason.COALESCED: "it goes together with others of the same beginning",
    ReleaseReason.LATEST_START_NEAR: "it had to start now to be done by its deadline",
    ReleaseReason.OVERDUE: "its latest start had passed, and its own schedule had not released it",
    ReleaseReason.STRANDED: "its own schedule had failed: the queue's storage was full then",
    # still parked
    HoldReason.POOL_BUSY: "all places of the pool are taken, and enough waits for the next ones",
    HoldReason.NO_WORKER: "the pool has no worker",
    HoldReason.LANE_PAUSED: "its lane is paused by an operator",
    HoldReason.NOT_BEFORE: "its not_before has not come",
    HoldReason.FIRES_SOON: "its own schedule is about to release it",
    HoldReason.OTHERS_FIRST: "others are ahead of it",
    HoldReason.HELD_FOR_TROUGH: "less priority work is expected later, and it can wait until then",
    HoldReason.COALESCING: "another with the same beginning is expected at once",
    # taken by a worker
    LANE: "it was sent to the lane at once, and waited there for a worker",
    FIRED: "NATS released it at its fire time; no scheduler had done so before",
    TAKEOVER: "the worker that ran it is dead",
    StealReason.WAITED: "the worker that its home belongs to did not take it in time",
    StealReason.ORPHAN: "no living worker serves its home",
    StealReason.NO_PLAN: "who serves its home was not known",
    # gave way
    "NO_SLOT": "a priority job found no free place",
    "NO_KV": "a priority job found no room for its KV",
    "KV_OUTGROWN": "answers grew longer than predicted, and the engine was about to run out of KV",
}
RELEASED = frozenset(reason.value for reason in ReleaseReason)  # that a claim may tell of its job's release
STOLEN = frozenset(reason.value for reason in StealReason)
