"""Which worker's caches a job should meet: its affinity key, the home slot for it, and which worker serves which slot.

A home is a slot of a pool, not a worker: jobs name slots, and the scheduler says who serves them, so that a worker that
dies takes no name with it. A home is a wish, never a condition: any worker may run any job. Pure values in and out.

Source: DESIGN 5, bounded-load rendezvous hashing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import shake_128
from struct import unpack

from laneway.core.fleet import HomePlan, WorkerLease, WorkerState
from laneway.core.ids import hash_word
from laneway.core.job import GenerateTask
from laneway.policy.grouping import PREFIX_TOKENS

KEY_CHARACTERS = 16  # base32 characters, 80 bits: two sessions of a tenant never share one by chance
LOAD_FACTOR = 1.25  # of the mean load, rounded up: what a home may have (bounded-load hashing, DESIGN 5)
LOAD_RATIO = 1.5  # of the mean, whatever rounding up would allow
FEW = 4.0  # jobs that may share a home however little there is elsewhere: a cold prefill costs more than such a batch
_WEIGHT_BYTES = 4


def affinity_key(pool: str, tenant: str, task: GenerateTask) -> str:
    """Equal for jobs that gain from one worker's caches; empty where nothing would be gained.

    The session where the caller names one; else the first PREFIX_TOKENS of the prompt, where it has more than that: a
    shorter prefix saves less prefill than waiting for one worker may cost. A hash, salted by pool, tenant, adapter and
    cache_salt, so that it tells nothing of the prompt and matches no other tenant's. 16 base32 characters. O(1) in the
    prompt. Failure mode: conversations without a session id that begin alike share a key, and so a home: bounded load
    spreads them, but each worker then meets some of each conversation.
    """
    if task.session_id:
        kind, head = "session", task.session_id
    elif len(task.prompt_ids) > PREFIX_TOKENS:
        kind, head = "prefix", _head(task.prompt_ids[:PREFIX_TOKENS])
    else:
        return ""
    return _key("\x00".join((kind, pool, tenant, task.adapter, task.cache_salt, head)))


@lru_cache(256)  # a system prompt begins many jobs
def _head(ids: tuple[int, ...]) -> str:
    return ",".join(map(str, ids))


@lru_cache(1024)
def _key(text: str) -> str:
    return hash_word(text, KEY_CHARACTERS)


def prefix_hash(key: str) -> int:
    """An affinity key as the digests of hot prefixes carry it: 64 bits of it."""
    return int.from_bytes(shake_128(key.encode()).digest(8), "big")


# --- which home ------------------------------------------------------------------------------------


def choose_home(key: str, loads: Mapping[str, float], last: str = "") -> str:
    """The home of a job, of those in `loads` (jobs at each: running, ready, and sent since); empty: any.

    Rendezvous hashing with bounded load: each pair of key and home has a weight, the heaviest home wins, and one that
    is full gives way to the next. With m = (all load + this job) / homes, a home is full at
    max(FEW, min(ceil(1.25 m), floor(1.5 m))) jobs: never above 1.5x the mean, but for a FEW that may always meet.
    `last`: where the key's last job went; it stays there while that is served and has room, so that a home that comes
    back, or room that opens elsewhere, moves no warm session. Where a home comes or goes, only keys that it wins move.
    O(homes); 2 us for 2 homes, 4 us for 16. Independent of the order of `loads`.
    Failure mode: loads are as old as the plan; doors that send much between two plans do not know of each other, and
    may overshoot by what each sent meanwhile.
    """
    if not key or not loads:
        return ""
    room = room_of(loads)
    if last and loads.get(last, math.inf) < room:
        return last
    weights = weights_of(key, 1 + max(map(_index, loads)))
    best, best_rank = "", (-1, -1)
    for home, load in loads.items():
        if load < room:
            index = _index(home)
            rank = (weights[index], -index)
            if rank > best_rank:
                best, best_rank = home, rank
    return best


def room_of(loads: Mapping[str, float]) -> float:
    """Jobs from which on a home is full, for one more job. At least one home has less: the lightest is below the mean,
    and that is below either bound or below FEW."""
    mean = (sum(loads.values()) + 1.0) / len(loads)
    return max(FEW, min(math.ceil(LOAD_FACTOR * mean), math.floor(LOAD_RATIO * mean)))


def weights_of(key: str, homes: int) -> tuple[int, ...]:
    """The weight of a key at each home slot by number; those of the first do not change when slots are added."""
    return unpack(f"<{homes}I", shake_128(key.encode()).digest(_WEIGHT_BYTES * homes))


@lru_cache(1024)
def _index(home: str) -> int:
    """Home slots are numbered: h0, h1, ..."""
    return int(home[1:])


def served_loads(homes: Sequence[HomePlan], load: Callable[[str], float]) -> dict[str, float]:
    """What `choose_home` may choose from for a job that is to run now: the homes that somebody serves, and what is
    there. Empty where the pool has fewer than two."""
    return {each.home: load(each.home) for each in homes if each.worker_id} if len(homes) > 1 else {}


def others_at(home: HomePlan, own_least: int, own_most: int) -> int:
    """Jobs at a home that are not this door's, by a plan: its load less what was ours when it counted, which is not
    known to the moment but lies between `own_least` and `own_most`. Negative where jobs ended and we did not hear.

    What of it may be ours is taken to be: a job of ours that counted twice would move warm sessions for nothing.
    """
    shown = home.ready + home.running
    return shown - min(max(shown, own_least), own_most)


def home_again(key: str, homes: Sequence[HomePlan], worker_id: str) -> str:
    """The home of a job that goes back among the parked after `worker_id` ran it: that worker's own, whose cache holds
    its prompt and what it answered so far; where it has none, the heaviest of those that are served, by weight alone:
    one that was taken away is in the plan until it is empty. Empty without a key."""
    if not key or len(homes) < 2:
        return ""
    ours = next((each.home for each in homes if each.worker_id == worker_id), "")
    return ours or choose_home(key, {each.home: 0.0 for each in homes if each.worker_id})


# --- who serves it ---------------------------------------------------------------------------------


def assign_homes(
    homes: Sequence[str], workers: Iterable[WorkerLease], previous: Mapping[str, str]
) -> Mapping[str, str]:
    """Home -> worker_id, for the homes that get a worker. `previous`: home -> name of the worker that served it last.

    Each READY worker serves at most one home. A worker keeps the home that its name had, then the one that its lease
    shows (so that assignments outlive leaders); the rest take what is free, slots without a former holder first, since
    a holder may come back to its own. More homes than workers leave homes unserved, and anyone takes their jobs.
    O(homes + workers), deterministic. Failure mode: two workers of one name; the later incarnation counts first.
    """
    ready = sorted(
        (each for each in workers if each.state is WorkerState.READY),
        key=lambda each: (-each.started_s, each.worker_id),
    )
    given: dict[str, str] = {}
    taken: set[str] = set()

    def give(home: str, worker: WorkerLease) -> None:
        given[home] = worker.worker_id
        taken.add(worker.worker_id)

    by_name: dict[str, WorkerLease] = {}
    for worker in ready:
        by_name.setdefault(worker.name, worker)
    for home in sorted(homes, key=_index):
        holder = by_name.get(previous.get(home, ""))
        if holder is not None and holder.worker_id not in taken:
            give(home, holder)
    known = frozenset(homes)
    for worker in ready:
        if worker.home in known and worker.home not in given and worker.worker_id not in taken:
            give(worker.home, worker)
    free = sorted(known - given.keys(), key=lambda home: (bool(previous.get(home)), _index(home)))
    left = [each for each in ready if each.worker_id not in taken]
    left.sort(key=lambda each: (each.name, each.worker_id))
    for home, worker in zip(free, left, strict=False):
        give(home, worker)
    return given


# --- what is hot -----------------------------------------------------------------------------------


def merge_hot(per_worker: Iterable[Sequence[int]], most: int) -> tuple[int, ...]:
    """The hottest prefixes of a pool from those of its workers, each hottest first: turn by turn the next of each
    worker, in the order of the values where turns are equal. At most `most`. O(all)."""
    ranks: dict[int, int] = {}
    for hot in per_worker:
        for rank, prefix in enumerate(hot):
            ranks[prefix] = min(rank, ranks.get(prefix, rank))
    return tuple(sorted(ranks, key=lambda prefix: (ranks[prefix], prefix))[:most])
