"""What must hold after a run, whatever happened in it: DESIGN's promises, each as a function that complains.

They look at what the server stored, at what each caller was told, at what each engine computed, and at what every
service still holds when all is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

from laneway.admission.ledger import ENDED_WITHIN_S
from laneway.core import subjects
from laneway.core.dead_letters import given_up
from laneway.core.job import JobRecord, never_accepted
from laneway.core.lanes import LANES, JobState
from laneway.scheduler.loop import Scheduler
from laneway.workers.claims import STRIKES_MAX
from laneway.workers.service import Worker
from tests.sim.system.asks import TENANTS, Ask, StreamLog, Told, Way
from tests.sim.system.engines import EngineRun, expected_answer
from tests.sim.system.region import CRASH_ID, ERROR_ID, REGION, Gate, Region

FREED_S_MAX = 0.3  # two steps of the slowest engine, and the messages
DOOR_GONE_S_MAX = 4.6  # three beats that are missed, the look of a worker, a step
CLOCK_S = 0.5  # how far apart two processes may take the time of NATS to be, and what a claim takes on its way


def check_all(region: Region, asks: list[Ask]) -> list[str]:
    """Complaints; none where all is well."""
    by_label = {ask.label: ask for ask in asks}
    found: list[str] = []
    for job_id in region.history.jobs:
        found += (f"job {job_id}: {text}" for text in _job(region, job_id, by_label))
    for ask in asks:
        found += (f"ask {ask.label}: {text}" for text in _ask(region, ask))
    found += _left_on_the_server(region)
    for host in region.hosts:
        found += (f"{host.name}: {text}" for text in _left_in_a_service(host.part))
    return found


# --- a job, as the server saw it -----------------------------------------------------------------------------


def _job(region: Region, job_id: str, by_label: dict[str, Ask]) -> Iterator[str]:
    job = region.history.jobs[job_id]
    records = [(write.time_s, write.record) for write in job.writes]
    for (_, before), (time_s, after) in pairwise(records):
        if before.state.terminal and not _accepted_anew(before, after):
            yield f"ended {before.state} and was written again as {after.state} at {time_s:.3f}"
        yield from _step(before, after)
    for _, record in records:
        if [each.attempt for each in record.lineage] != list(range(1, record.attempt + 1)):
            yield f"lineage {record.lineage} of attempt {record.attempt}"
    for time_s, record in records:
        claimed = record.state is JobState.RUNNING and record.lineage[-1].claimed_s
        if claimed and claimed > record.contract.deadline_s + CLOCK_S:
            yield f"claimed {claimed - record.contract.deadline_s:.3f} s after its deadline, stored at {time_s:.3f}"
    final = records[-1][1] if records else None
    if final is None:
        yield "queued, and there is no record"
    elif not final.state.terminal:
        yield f"not ended: {final.state}, attempt {final.attempt} of {final.owner or 'nobody'}"
    else:
        yield from _end(region, final, by_label)
    for message in job.queued.values():
        if message.gone_s is None:
            yield f"still queued: {message.subject}"


def _accepted_anew(before: JobRecord, after: JobRecord) -> bool:
    """Nothing but the record was stored, so that the same key may be tried again."""
    return never_accepted(before) and after.state in (JobState.WAITING, JobState.REFUSED)


def _step(before: JobRecord, after: JobRecord) -> Iterator[str]:
    """Fencing: an attempt begins once, and while one runs only its owner goes on with it."""
    if never_accepted(before):
        return
    if not before.attempt <= after.attempt <= before.attempt + 1:
        yield f"attempt {before.attempt} was followed by {after.attempt}"
    if after.attempt > before.attempt and after.state is not JobState.RUNNING:
        yield f"attempt {after.attempt} began as {after.state}"
    same = after.attempt == before.attempt and after.state is JobState.RUNNING
    if same and (before.state, before.owner) != (JobState.RUNNING, after.owner):
        yield f"attempt {after.attempt} went from {before.owner or before.state} to {after.owner}"
    if after.starts < before.starts or after.clean < before.clean:
        yield "its starts were counted down"


def _end(region: Region, final: JobRecord, by_label: dict[str, Ask]) -> Iterator[str]:
    ask = by_label.get(final.contract.labels.get("ask", ""))
    if ask is None:  # refused before anything of it was known
        return
    if (final.state is JobState.SUCCEEDED) != (final.result is not None):
        yield f"{final.state}, and its result is {final.result}"
    yield from _reasons(region, ask, final)
    if final.result is None:
        return
    answer = final.result.token_ids
    yield from _one_run(region, ask, answer, "the result")
    if final.result.text != bytes(answer).decode():
        yield f"the text {final.result.text!r} is not that of {answer}"
    if final.result.usage.completion_tokens != len(answer):
        yield f"{final.result.usage} for {len(answer)} tokens"
    # Its record may be late, where NATS was away. What was computed late is no answer.
    began_s = region.clock.now() - region.loop.time()
    runs = [run for run in region.engines.of(ask.prompt) if run.whole == answer]
    if answer and not any(run.stepped_s + began_s <= final.contract.deadline_s + CLOCK_S for run in runs):
        yield f"succeeded by what was computed after its deadline: {runs}"


def _reasons(region: Region, ask: Ask, final: JobRecord) -> Iterator[str]:
    """Nothing fails but what a fault made fail."""
    if final.state is not JobState.FAILED:
        return
    assert final.error is not None
    if given_up(final) and final.starts - final.clean < STRIKES_MAX:
        yield f"was given up ({final.error.reason}) after {final.starts} starts, {final.clean} of them clean"
    if final.error.reason == "ENGINE_FAILED" and ERROR_ID not in ask.prompt:
        yield f"failed: {final.error}"
    if region.undisturbed and not {ERROR_ID, CRASH_ID} & set(ask.prompt):
        yield f"failed though nothing went wrong: {final.error}"


def _one_run(region: Region, ask: Ask, answer: tuple[int, ...], what: str) -> Iterator[str]:
    """No splice: what the request decides is what it decides; what chance decided is all of one line of runs."""
    decided = ask.temperature == 0.0 or ask.seed is not None
    if decided:
        options = region.settings.engine_options_of(region.pool.name)
        wanted = expected_answer(ask.prompt, ask.max_tokens, ask.temperature, ask.seed, options, whole=ask.whole)
        if wanted[: len(answer)] != answer or (what == "the result" and wanted != answer):
            yield f"{what} is {bytes(answer)!r}, and {bytes(wanted)!r} was due"
        return
    line = _line(region.engines.of(ask.prompt), answer)
    if answer and line is None:
        yield f"{what}, {bytes(answer)!r}, is of no single run"


def _line(runs: list[EngineRun], answer: tuple[int, ...]) -> EngineRun | None:
    """A run that gave the answer, and whose beginning another gave."""
    for run in runs:
        if run.whole[: len(answer)] == answer:
            earlier = [each for each in runs if each is not run and each.began_s <= run.began_s]
            if not run.before or _line(earlier, run.before) is not None:
                return run
    return None


# --- a caller, and what it was told --------------------------------------------------------------------------


def _ask(region: Region, ask: Ask) -> Iterator[str]:
    if len(ask.job_ids) > 1 and ask.key:
        yield f"one key made {len(ask.job_ids)} jobs: {ask.job_ids}"
    made = [job_id for job_id, job in region.history.jobs.items() if _label(job_id, region) == ask.label and job.queued]
    told_no = bool(ask.tries) and all(told is Told.REFUSED for told in ask.tries)
    if made and told_no:
        yield f"was refused each time, and {made} was queued"
    if Told.ACCEPTED in ask.tries and not ask.job_ids:
        yield "was accepted without a job"
    finals = {job_id: region.history.final(job_id) for job_id in ask.job_ids}
    for job_id, final in finals.items():
        if final is None:
            yield f"was told of {job_id}, which never was"
        elif Told.ACCEPTED in ask.tries and final.state is JobState.REFUSED:
            yield f"was accepted, and {job_id} ended as refused"
    final = next(iter(finals.values()), None)
    for log in ask.streams:
        yield from _stream(region, ask, log, final)
        unread = log.error is not None and "record cannot be read" in str(
            log.error
        )  # NATS was away: nobody knew better
        if final is not None and log.end is not None and log.end is not final.state and not unread:
            yield f"was told {log.end} ({log.error!r}), and the job ended {final.state} ({final.error})"
        if final is not None and log.finished and final.result and log.next_index != len(final.result.token_ids):
            yield f"a stream ended at {log.next_index} of {len(final.result.token_ids)} tokens"
    told = ask.cancel_told
    if told not in (None, JobState.REFUSED) and final is not None and told is not final.state:  # or accepted anew since
        yield f"its cancel was told {ask.cancel_told}, and the job ended {final.state}"
    yield from _follows(region, ask, final)


def _label(job_id: str, region: Region) -> str:
    job = region.history.jobs[job_id]
    record = job.writes[-1].record if job.writes else None
    if record is None and job.queued:
        record = next(iter(job.queued.values())).job.record
    return record.contract.labels.get("ask", "") if record is not None else ""


def _stream(region: Region, ask: Ask, log: StreamLog, final: JobRecord | None) -> Iterator[str]:
    got = tuple(log.ids)
    if log.text != bytes(got).decode():
        yield f"a stream's text {log.text!r} is not that of {bytes(got)!r}"
    if log.finished and final is not None and final.result is not None:
        whole = final.result.token_ids
        if whole[log.from_index :] != got:
            yield f"a stream from {log.from_index} gave {bytes(got)!r}, and the answer is {bytes(whole)!r}"
    # What a caller has who went on where another stream had ended.
    yield from _one_run(region, ask, (*log.before, *got), f"what a caller got in all (the last from {log.from_index})")


def _alone_since_s(region: Region, ask: Ask) -> float | None:
    """When the door of a caller died who does not want his job kept, and who can be missed: nothing else was wrong."""
    if ask.keeps or ask.key or ask.way is not Way.ATTACHED or len(ask.streams) != 1:
        return None
    dropped_s = ask.streams[0].dropped_s
    if dropped_s is None:
        return None
    near = [1 for began_s, ended_s in region.troubled if began_s < dropped_s + 6.0 and ended_s > dropped_s - 4.0]
    return None if near else dropped_s


def _follows(region: Region, ask: Ask, final: JobRecord | None) -> Iterator[str]:
    """The engine is freed: nothing is computed long after the end of a job, where its worker can know."""
    if final is None or not final.timings.ended_s:
        return
    began_s = region.clock.now() - region.loop.time()
    alone_s = _alone_since_s(region, ask)
    for run in region.engines.of(ask.prompt):
        # A job that is claimed later is given as long from there for a door to be heard.
        since_s = max(alone_s, run.began_s) if alone_s is not None else math.inf
        if run.stepped_s > since_s + DOOR_GONE_S_MAX:
            yield f"{run.worker_id} computed it {run.stepped_s - since_s:.1f} s after its door had died"
        if run.ended_s is None:
            yield f"{run.worker_id} still computes it"
        elif region.undisturbed and ask.left_s is not None and not ask.keeps and not ask.twins:
            if run.stepped_s > ask.left_s + FREED_S_MAX:
                yield f"{run.worker_id} computed it {run.stepped_s - ask.left_s:.2f} s after its caller had left"
        elif run.stepped_s + began_s > final.contract.deadline_s + CLOCK_S + region.freed_s_max:
            late_s = run.stepped_s + began_s - final.contract.deadline_s
            yield f"{run.worker_id} computed it until {late_s:.1f} s after its deadline"


# --- what is left --------------------------------------------------------------------------------------------


def _left_on_the_server(region: Region) -> Iterator[str]:
    yield from _dead_letters(region)
    for subject in region.server.streams[subjects.checkpoint_stream(REGION)].by_subject:
        # Whoever gives an answer removes its checkpoints; those of jobs that nobody ran to the end are left to age.
        final = region.history.final(subject.split(".")[2])
        if final is None or (final.state is JobState.SUCCEEDED and final.lineage[-1].owner in _alive(region)):
            yield f"a checkpoint is left: {subject}"
    for subject in region.server.streams[subjects.objects_stream(REGION)].by_subject:
        job_id = subjects.object_parts(subject)[0].job_id
        if region.history.final(job_id) is None and not _may_be_orphaned(region):
            yield f"an object of no job is left: {subject}"
    streams = [subjects.lane_stream(REGION, lane) for lane in LANES]
    for name in (*streams, subjects.ingest_stream(REGION)):
        stream = region.server.streams[name]
        for message in stream.messages.values():
            yield f"{name} holds {message.subject}"
        for consumer in stream.consumers.values():
            if consumer._pending:
                yield f"{consumer.name} waits for {len(consumer._pending)} acknowledgements"


def _may_be_orphaned(region: Region) -> bool:
    """A door that died between object and record leaves one, which a sweep removes after hours; and so does one that
    lost NATS there, and found it again after the job had been given up."""
    return region.nats_died or any(host.dead for host in region.doors)


def _alive(region: Region) -> set[str]:
    return {host.part.snapshot().worker_id for host in region.workers if isinstance(host.part, Worker)}


def _dead_letters(region: Region) -> Iterator[str]:
    """One for each job that was given up, and none for others."""
    letters = [subject.rsplit(".", 1)[1] for subject in region.server.streams[subjects.dead_stream(REGION)].by_subject]
    finals = {job_id: region.history.final(job_id) for job_id in region.history.jobs}
    wanted = {job_id for job_id, final in finals.items() if final is not None and given_up(final)}
    if wanted != set(letters) or len(letters) != len(wanted):
        yield f"dead letters of {sorted(letters)}, and {sorted(wanted)} were given up"


def _left_in_a_service(part: object) -> Iterator[str]:
    if part is None:
        yield "does not serve"
    elif isinstance(part, Worker):
        yield from _left_in_a_worker(part)
    elif isinstance(part, Gate):
        yield from _left_in_a_door(part)
    elif isinstance(part, Scheduler) and part.lead is not None and len(part.lead.parking.index):
        yield f"its index has {len(part.lead.parking.index)} parked jobs"


def _left_in_a_worker(worker: Worker) -> Iterator[str]:
    assert worker.runs is not None
    assert worker.seats is not None
    assert worker.pulls is not None
    stats, seats = worker.sequences.stats(), worker.seats
    capacity = worker.engine.capacity
    assert capacity is not None
    for what, count in {
        "runs": len(worker.runs),
        "staged jobs": len(worker.pulls.staged),
        "sequences": len(worker.sequences),
        "sequences in its engine": stats.running + stats.queued,
        "prompt tokens in its engine": stats.prefilling_tokens,
        "taken seats": capacity.slots - seats.slots_free,
        "reserved tokens": capacity.kv_tokens - seats.kv_tokens_free,
    }.items():
        if count:
            yield f"{count} {what} are left"


def _left_in_a_door(gate: Gate) -> Iterator[str]:
    house = gate.house
    for what, count in {
        "calls": len(gate.calls),
        "streams": len(house.door),
        "chores": len(house.chores),
        "outlets": len(house.door._outlets),
        "timers of deadlines": len(house.door._deadlines),
        "late records": len(house.late_records._timers),
        "jobs in its ledger": _awaited(gate),
        "streams of tenants": sum(map(gate.house.admission._streams.live, TENANTS)),
        "open jobs of tenants": sum(
            gate.house.admission._judge._ledger.tenants.open(tenant, lane) for tenant in TENANTS for lane in LANES
        ),
    }.items():
        if count:
            yield f"{count} {what} are left"


def _awaited(gate: Gate) -> int:
    """Jobs whose end should have been told, or whose deadline is long over."""
    ledger = gate.house.admission._judge._ledger
    now_s = gate.house.clock.monotonic()
    return sum(due_s + ENDED_WITHIN_S + 3.0 < now_s for _, due_s in ledger._live.values())
