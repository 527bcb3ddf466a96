"""The scenarios by name: five workloads, the mixed day, and the batch-gateway mix.

Each runs on recorded traces where a folder has them, native or converted, under the names that they were published
with; else on made-up streams with the traces' published statistics. `notes` says which of both.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from laneway.core.errors import ConfigError
from laneway.core.lanes import Lane
from laneway.simulator import made_up
from laneway.simulator.bootstrap import Patience
from laneway.simulator.clients import trace_of_clients
from laneway.simulator.columns import Contract
from laneway.simulator.readers import agents, read_trace, servegen
from laneway.simulator.readers.compact import read_sessions
from laneway.simulator.scaling import compressed, excerpt
from laneway.simulator.trace import Trace
from laneway.simulator.workload import Draw, Stream, Workload, job_list, rate_of, some_sessions, tenants_of

# Names of one trace, as published and as converted, without endings.
CHAT = ("azure-2023-conv", "AzureLLMInferenceTrace_conv")
CODE = ("azure-2023-code", "AzureLLMInferenceTrace_code")
LONG_CHAT = ("mooncake-conversation", "conversation_trace")
JOBS = ("arxiv-summarization-lengths",)
SESSIONS = "agent-sessions.csv.gz"
SESSION_FOLDER = "agent-sessions"
WINDOWS = "servegen-windows.csv.gz"
LENGTHS = "servegen-lengths.csv.gz"
ENDINGS = (".csv.gz", ".csv", ".jsonl.gz", ".jsonl")

SMOKE_S = 600.0  # of a recorded trace, from its begin
DAY_S = 86_400.0
CONTEXT_TOKENS = 131_072
THINK_S_MOST = 60.0

# Contracts: MLPerf Inference's limits for Llama-3.1-8B (interactive, server), and the project's own.
INTERACTIVE = Contract(Lane.PRIORITY, ttft_s=0.5, tpot_s=0.03, deadline_s=120.0, max_tokens=1024)
SHORT = Contract(Lane.PRIORITY, ttft_s=2.0, tpot_s=0.1, deadline_s=120.0, max_tokens=1024)
SERVER = Contract(Lane.PRIORITY, ttft_s=2.0, tpot_s=0.1, deadline_s=300.0, max_tokens=2048)
LONG = Contract(Lane.DEFERRABLE, ttft_s=6.0, tpot_s=0.1, deadline_s=300.0, max_tokens=2048)
AGENT = Contract(Lane.DEFERRABLE, ttft_s=7.0, tpot_s=0.1, deadline_s=1800.0, max_tokens=4096)

PEOPLE = Patience()  # who look at a screen
READERS = Patience(median_s=60.0)  # who were told that it takes longer (an assumption)
PROGRAMS = Patience(median_s=float("inf"))  # wait for their first token, and stop half-way now and then

TEAMS = tenants_of([f"team-{number}" for number in range(1, 9)], 0.3)


def chat(data: Path | None, *, smoke: bool) -> Workload:
    trace = _trace(data, CHAT, made_up.chat, smoke)
    stream = Stream(trace, INTERACTIVE, speed=3.0, tenants=TEAMS, patience=PEOPLE)
    what = "TTFT p99 500 ms and TPOT p99 30 ms; first come first served waits 0.28 s at p99"
    return _workload("chat", what, [stream], trace.span_s / 3.0)


def code_burst(data: Path | None, *, smoke: bool) -> Workload:
    trace = _trace(data, CODE, made_up.code, smoke)
    stream = Stream(trace, SHORT, speed=3.0, tenants=TEAMS, patience=PEOPLE)
    what = "99 % of what is admitted has its first token in 2 s, the rest is refused at once"
    return _workload("code-burst", what, [stream], trace.span_s / 3.0)


def long_chat(data: Path | None, *, smoke: bool) -> Workload:
    trace = _trace(data, LONG_CHAT, made_up.long_chat, smoke)
    stream = Stream(trace, LONG, speed=0.5, tenants=TEAMS, patience=READERS)
    what = "TTFT p95 6 s and TPOT p99 100 ms; prefix hits at least 90 % of one cache of the fleet's size"
    return _workload("long-chat", what, [stream], trace.span_s / 0.5)


def coding_agents(data: Path | None, *, smoke: bool, sessions: int = 48, turns: int = 40) -> Workload:
    """`sessions` at load 1: 12 for each of four engines, which fit; twice as many make them evict."""
    source = _sessions(data)
    sessions, turns = (12, 8) if smoke else (sessions, turns)

    def draw(asked: Draw) -> Trace:
        number = max(1, round(sessions * asked.load))
        return some_sessions(source, number, asked, start_s=min(120.0, asked.span_s), turns=turns)

    what = "a turn's TTFT p95 1 s where its session is resident, else 7 s; 90 % of reusable tokens reused"
    return _workload("agents", what, [Stream(draw, AGENT, patience=PROGRAMS)], 28.0 * turns)


def tenants_and_backfill(data: Path | None, *, smoke: bool) -> Workload:
    jobs, span_s = (200, 240.0) if smoke else (2000, 1440.0)
    day, note = _day(data)
    streams = [Stream(day, SERVER, patience=PEOPLE), _jobs(data, jobs, deadline_s=2.0 * span_s)]
    what = "tenants inside their quota keep 2 s and 100 ms at p99; every job done by its deadline"
    return _workload("tenants-and-backfill", what, streams, span_s, (note,))


def mixed_day(data: Path | None, *, smoke: bool, per_s: float = 20.0) -> Workload:
    """60 % priority (chat, code and a pool's tenants), 20 % deferrable, 20 % batch, by arrivals."""
    span_s = 300.0 if smoke else 1440.0
    chats, codes = _trace(data, CHAT, made_up.chat, smoke), _trace(data, CODE, made_up.code, smoke)
    longs = _trace(data, LONG_CHAT, made_up.long_chat, smoke)
    day, note = _day(data, per_s=0.2 * per_s)
    streams = [
        _at(chats, 0.25 * per_s, INTERACTIVE, PEOPLE),
        _at(codes, 0.15 * per_s, SHORT, PEOPLE),
        Stream(day, SERVER, patience=PEOPLE),
        _at(longs, 0.2 * per_s, LONG, READERS),
        _jobs(data, round(0.2 * per_s * span_s), deadline_s=2.0 * span_s),
    ]
    what = "each stream's own promises, all at once; run it with Poisson arrivals beside"
    return _workload("mixed-day", what, streams, span_s, (note,))


def batch_gateway(data: Path | None, *, smoke: bool) -> Workload:
    """After llm-d's batch gateway: interactive traffic in bursts, and batches with a window each."""
    span_s, share = (300.0, 0.05) if smoke else (3600.0, 1.0)
    size = round(6.0 * span_s)
    lengths = _trace(data, CHAT, made_up.chat, smoke=False)
    bursty = made_up.bursty_like(lengths, size, per_s=6.0, cv=3.0)
    batches = (("batch-30min", 1800.0, 2000), ("batch-2h", 7200.0, 4000), ("batch-24h", 86_400.0, 8000))
    streams = [Stream(bursty, INTERACTIVE, tenants=TEAMS, patience=PEOPLE)]
    streams += [
        _jobs(data, round(jobs * share), deadline_s=window_s, at_s=60.0 * number, tenant=tenant)
        for number, (tenant, window_s, jobs) in enumerate(batches)
    ]
    what = "interactive TTFT p95 within 30 % of what it is without batches, which are done in their windows"
    return _workload("batch-gateway", what, streams, span_s)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    "chat": chat,
    "code-burst": code_burst,
    "long-chat": long_chat,
    "agents": coding_agents,
    "tenants-and-backfill": tenants_and_backfill,
    "mixed-day": mixed_day,
    "batch-gateway": batch_gateway,
}


def workload(name: str, data: Path | None = None, *, smoke: bool = False) -> Workload:
    """`data`: a folder with recorded traces; what it lacks is made up. ConfigError: no such scenario or folder."""
    if name not in WORKLOADS:
        raise ConfigError(f"{name!r} is no workload; there are {', '.join(WORKLOADS)}")
    if data is not None and not data.is_dir():
        raise ConfigError(f"{data} is no folder of traces")
    return WORKLOADS[name](data, smoke=smoke)


def found(data: Path | None, names: tuple[str, ...]) -> Path | None:
    """A file of one of the names, with any ending that readers know."""
    if data is None:
        return None
    files = (data / f"{name}{ending}" for name in names for ending in ENDINGS)
    return next((file for file in files if file.is_file()), None)


def _workload(name: str, what: str, streams: list[Stream], span_s: float, notes: tuple[str, ...] = ()) -> Workload:
    return Workload(name, what, tuple(streams), span_s, notes)


def _trace(data: Path | None, names: tuple[str, ...], instead: Callable[[], Trace], smoke: bool) -> Trace:
    file = found(data, names)
    trace = instead() if file is None else read_trace(file)
    return excerpt(trace, 0.0, SMOKE_S) if smoke else trace


def _at(trace: Trace, per_s: float, contract: Contract, patience: Patience) -> Stream:
    return Stream(trace, contract, speed=per_s / rate_of(trace), tenants=TEAMS, patience=patience)


def _jobs(data: Path | None, jobs: int, *, deadline_s: float, at_s: float = 0.0, tenant: str = "batch") -> Stream:
    file = found(data, JOBS)
    lengths = made_up.jobs() if file is None else read_trace(file)
    return job_list(lengths, jobs, at_s=at_s, deadline_s=deadline_s, tenant=tenant)


def _sessions(data: Path | None) -> Trace:
    if data is not None and (data / SESSIONS).is_file():
        return read_sessions(data / SESSIONS, think_s_most=THINK_S_MOST, prompt_tokens_most=CONTEXT_TOKENS)
    if data is not None and (data / SESSION_FOLDER).is_dir():
        folder = data / SESSION_FOLDER
        return agents.read(folder, think_s_most=THINK_S_MOST, prompt_tokens_most=CONTEXT_TOKENS)
    return made_up.agents(think_s_most=THINK_S_MOST)


def _day(data: Path | None, *, per_s: float = 20.0) -> tuple[Callable[[Draw], Trace], str]:
    """A pool's day run through in the run's span, whatever that is, at this mean rate times the load."""
    recorded = data is not None and (data / WINDOWS).is_file() and (data / LENGTHS).is_file()
    if recorded:
        assert data is not None
        clients, note = servegen.clients_of_summary(data / WINDOWS, data / LENGTHS), f"m-large: {servegen.SOURCE}"
    else:
        clients, note = made_up.clients(), "made up: a pool of 162 clients like ServeGen's m-large"

    def draw(asked: Draw) -> Trace:
        day_per_s = per_s * asked.load * asked.span_s / DAY_S
        random = np.random.default_rng(np.random.SeedSequence([asked.seed, 8]))
        day = trace_of_clients("m-large", clients, servegen.EVERY_S, random, per_s=day_per_s)
        return compressed(day, DAY_S / asked.span_s)

    return draw, f"{note}; a day of 24 hours in the run's span"
