"""What callers ask for, and what came of it: drawn from the seed before anything runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from laneway.core import ids
from laneway.core.errors import LanewayError
from laneway.core.lanes import JobState, Lane
from laneway.runtime.wire.times import timestamp_of
from laneway.v1 import common_pb2, task_pb2
from tests.sim.system.engines import PROMPT_END
from tests.sim.system.region import CRASH_ID, ERROR_ID, REGION

TENANTS = ("acme", "bravo", "corto")
SESSIONS = ("", "", "morning", "noon", "night")
WIRE_LANE = {
    Lane.PRIORITY: common_pb2.LANE_PRIORITY,
    Lane.DEFERRABLE: common_pb2.LANE_DEFERRABLE,
    Lane.BATCH: common_pb2.LANE_BATCH,
}
DUE_S = {Lane.PRIORITY: (4.0, 20.0), Lane.DEFERRABLE: (8.0, 40.0), Lane.BATCH: (15.0, 45.0)}


class Way(StrEnum):
    """How a request comes in."""

    ATTACHED = "attached"
    SUBMIT = "submit"
    INGEST = "ingest"


class Told(StrEnum):
    """What a try came to, as its caller knows it."""

    ACCEPTED = "accepted"
    REFUSED = "refused"  # nothing runs
    UNKNOWN = "unknown"


@dataclass
class StreamLog:
    """What one call gave its reader."""

    from_index: int = 0
    next_index: int = 0
    before: tuple[int, ...] = ()  # what its reader had got from earlier streams
    ids: list[int] = field(default_factory=list)
    text: str = ""
    attempt: int = 0
    finished: bool = False
    dropped_s: float | None = None  # when its door died, on the loop's time
    error: BaseException | None = None
    slow: bool = False

    @property
    def end(self) -> JobState | None:
        """The end of the job that it told, if it told one."""
        if self.finished:
            return JobState.SUCCEEDED
        if isinstance(self.error, LanewayError) and self.error.reason != "CALL_DEADLINE":
            return _END_OF.get(self.error.row.label)
        return None


_END_OF = {"expired": JobState.EXPIRED, "cancelled": JobState.CANCELLED, "engine_failed": JobState.FAILED}


@dataclass
class Ask:
    label: str
    at_s: float  # of the run
    tenant: str
    lane: Lane
    way: Way
    prompt: tuple[int, ...]
    max_tokens: int
    due_s: float  # after it is asked
    temperature: float = 0.0
    seed: int | None = None
    penalty: float | None = None
    whole: bool = False  # on to max_tokens
    session: str = ""  # that it belongs to, and goes to one home slot with
    key: str = ""
    keeps: bool = False
    slow: bool = False
    twins: bool = False  # asked twice at once, with one key
    leaves_after: int | None = None  # messages
    returns: bool = False  # its connection breaks then, and it goes on at another door
    cancels_after_s: float | None = None
    not_before_s: float | None = None
    # what came of it
    asked_s: float = 0.0  # wall
    deadline_s: float = 0.0
    job_ids: list[str] = field(default_factory=list)
    tries: list[Told] = field(default_factory=list)
    streams: list[StreamLog] = field(default_factory=list)
    cancel_told: JobState | None = None  # what CancelJob returned
    left_s: float | None = None  # when its caller went away, or was told that it is cancelled; the loop's time
    left: bool = False
    done: bool = False

    def spec(self, now_s: float) -> task_pb2.JobSpec:
        """The same at every try, as an idempotent caller must do."""
        if not self.deadline_s:
            self.asked_s, self.deadline_s = now_s, now_s + self.due_s
        sampling = task_pb2.Sampling(max_tokens=self.max_tokens, temperature=self.temperature, ignore_eos=self.whole)
        if self.seed is not None:
            sampling.seed = self.seed
        if self.penalty is not None:
            sampling.presence_penalty = self.penalty
        contract = common_pb2.Contract(
            lane=WIRE_LANE[self.lane], deadline=timestamp_of(self.deadline_s), labels={"ask": self.label}
        )
        if self.keeps:
            contract.on_disconnect = common_pb2.ON_DISCONNECT_KEEP
        if self.not_before_s is not None:
            contract.not_before.FromMicroseconds(round((self.asked_s + self.not_before_s) * 1e6))
        tokens = task_pb2.TokenPrompt(ids=self.prompt)
        return task_pb2.JobSpec(
            model="chat",
            generate=task_pb2.GenerateTask(tokens=tokens, sampling=sampling, session_id=self.session),
            contract=contract,
        )

    def keyed_id(self) -> str:
        return ids.keyed_job_id(REGION, self.tenant, self.key)

    def knows(self, job_id: str) -> None:
        if job_id not in self.job_ids:
            self.job_ids.append(job_id)


def draw_asks(seed: int, count: int, span_s: float) -> list[Ask]:
    """Some come alone, some in bursts."""
    random = Random(f"{seed} asks")
    asks: list[Ask] = []
    poison = random.random() < 0.4
    while len(asks) < count:
        at_s = random.uniform(0.0, span_s)
        burst = random.choice((1, 1, 1, 2, 5, 14))
        lane = random.choice((*Lane, Lane.PRIORITY))
        for _ in range(min(burst, count - len(asks))):
            asks.append(_draw(random, len(asks), at_s + random.uniform(0.0, 0.3), lane, poison=poison))
    sessions = Random(f"{seed} sessions")
    for ask in asks:
        ask.session = sessions.choice(SESSIONS)
    return sorted(asks, key=lambda ask: ask.at_s)


def _draw(random: Random, number: int, at_s: float, lane: Lane, *, poison: bool) -> Ask:
    way = random.choice((Way.ATTACHED, Way.ATTACHED, Way.ATTACHED, Way.SUBMIT, Way.SUBMIT, Way.INGEST))
    text = f"{number} " + "x" * random.choice((0, 3, 20, 150))
    prompt = list(text.encode())
    if random.random() < 0.06:
        prompt[-1] = ERROR_ID
    elif poison and random.random() < 0.04:
        prompt[-1] = CRASH_ID
    low_s, high_s = DUE_S[lane]
    ask = Ask(
        label=str(number),
        at_s=at_s,
        tenant=random.choice(TENANTS),
        lane=lane,
        way=way,
        prompt=(*prompt, PROMPT_END),
        max_tokens=random.choice((1, 4, 12, 30, 60, 150)),
        due_s=random.choice((low_s, random.uniform(low_s, high_s), high_s)),
        temperature=random.choice((0.0, 0.8)),
        slow=random.random() < 0.1,
        whole=random.random() < 0.4,
    )
    if ask.temperature and random.random() < 0.3:
        ask.seed = random.getrandbits(16)
    elif random.random() < 0.1:
        ask.penalty = 0.5
    if way is Way.INGEST or random.random() < 0.5:
        ask.key = f"key-{number}"
        ask.twins = way is not Way.INGEST and random.random() < 0.2
    if way is Way.ATTACHED:
        ask.keeps = random.random() < 0.4
        ask.leaves_after = random.choice((None, None, None, 0, 1, random.randint(2, 20)))
        ask.returns = ask.keeps and random.random() < 0.8
    if random.random() < 0.15:
        ask.cancels_after_s = random.uniform(0.0, 6.0)
    if lane.may_park and random.random() < 0.2:
        ask.not_before_s = random.uniform(0.5, low_s / 2)
    return ask
