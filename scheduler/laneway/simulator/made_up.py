"""Made-up stand-ins for recorded traces, with their published statistics, so that a scenario runs without the files.

What is kept: how many requests, their mean rate, the coefficient of variation of gaps, median and 95th percentile of
lengths, and about how much of prompts is shared. What is not: silences, trends over the hour, and whatever else makes a
recorded trace worth more. A scenario says in its notes which it was.
"""

from __future__ import annotations

import math

import numpy as np

from laneway.simulator.clients import Client, Quantiles
from laneway.simulator.columns import starts_of, trace_of
from laneway.simulator.processes import P95, Lengths, diurnal, gamma_arrivals, shares_like
from laneway.simulator.readers.sessions import Session, reusing, trace_of_sessions
from laneway.simulator.trace import Ints, Prefixes, Trace

BLOCK_TOKENS = 512  # of made-up chats' prefixes
SESSION_BLOCK_TOKENS = 64
CONTINUES = (
    0.6  # share of long chats that go on with another one: gives the recorded share of known prompt blocks, 0.37
)
BACK = 700  # chats, on average, to the one that is gone on with: gives the recorded hits of small caches


def requests(
    name: str, size: int, per_s: float, cv: float, prompts: Lengths, answers: Lengths, *, seed: int = 0
) -> Trace:
    """Gamma gaps and log-normal lengths, independent of each other."""
    gaps, asked, said = np.random.default_rng(np.random.SeedSequence([seed, 3])).spawn(3)
    note = f"made up: {size} requests at {per_s:g}/s, gamma gaps with a CV of {cv:g}, log-normal lengths"
    return trace_of(
        name, gamma_arrivals(gaps, size, per_s, cv), prompts.draw(asked, size), answers.draw(said, size), notes=[note]
    )


def chat(size: int = 19_366) -> Trace:
    """Statistics of azure-2023-conv."""
    return requests("chat", size, 5.53, 1.09, Lengths(1020, 4083, 14_050), Lengths(129, 451, 1000))


def bursty_like(lengths: Trace, size: int, *, per_s: float, cv: float) -> Trace:
    """Requests with a trace's lengths, drawn in pairs, at gamma gaps."""
    gaps, rows = np.random.default_rng(np.random.SeedSequence([0, 9])).spawn(2)
    row = rows.integers(0, len(lengths), size)
    note = f"arrivals made up: {size} requests at {per_s:g}/s, gamma gaps with a CV of {cv:g}"
    arrival_s = gamma_arrivals(gaps, size, per_s, cv)
    return trace_of(
        lengths.name, arrival_s, lengths.prompt_tokens[row], lengths.output_tokens[row], notes=[*lengths.notes, note]
    )


def code(size: int = 8_819) -> Trace:
    """Statistics of azure-2023-code."""
    return requests("code", size, 2.57, 13.2, Lengths(1469, 7303, 7437), Lengths(13, 90, 1899))


def long_chat(size: int = 12_031) -> Trace:
    """Statistics of mooncake-conversation, ticks spread; chats that go on share their prompts' begin."""
    made = requests("long-chat", size, 3.40, 1.0, Lengths(6909, 39_550, 126_195), Lengths(350, 698, 2000))
    root = _roots(size, np.random.default_rng(np.random.SeedSequence([0, 4])))
    prompt_tokens = _rising_in(root, made.prompt_tokens)
    counts = prompt_tokens // BLOCK_TOKENS
    starts = starts_of(counts)
    inside = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    most = int(counts.max(initial=0)) + 1
    prefixes = Prefixes(BLOCK_TOKENS, np.repeat(root * most, counts) + inside, starts)
    return trace_of(
        made.name, made.arrival_s, prompt_tokens, made.output_tokens, prefixes=prefixes,
        notes=[*made.notes, "a later prompt of a chat begins with the one before"],
    )  # fmt: skip


def _roots(size: int, random: np.random.Generator) -> Ints:
    """Of each chat the first one that it goes on with, directly or through others; itself where it begins."""
    row = np.arange(size)
    back = 1 + np.floor(random.exponential(BACK, size)).astype(np.int64)
    root = np.where((random.random(size) < CONTINUES) & (row - back >= 0), row - back, row)
    while not np.array_equal(root, root[root]):
        root = root[root]
    return root


def _rising_in(group: Ints, values: Ints) -> Ints:
    """The same values, rising inside each group in the order of its rows."""
    rows = np.argsort(group, kind="stable")
    rising = np.empty_like(values)
    rising[rows] = values[np.lexsort((values, group))]
    return rising


def agents(sessions: int = 251, turns: int = 45, *, think_s_most: float = math.inf) -> Trace:
    """Statistics of coding-agent sessions that stay under 131,072 tokens: a prompt grows by what tools say."""
    random = np.random.default_rng(np.random.SeedSequence([0, 5]))
    spread = math.log(10_941 / 727) / P95
    made, fresh = [], 0
    for number in range(sessions):
        size = int(np.clip(random.geometric(1.0 / turns), 3, 561))
        grown = np.exp(math.log(727) + spread * random.standard_normal(size))
        prompt = np.minimum(14_948 + np.cumsum(grown), 131_072).astype(np.int64)
        answers = Lengths(216, 1554, 18_195).draw(random, size)
        think_s = np.exp(math.log(10.0) + math.log(44.5) / P95 * random.standard_normal(size))
        session = Session(str(number), think_s.tolist(), prompt.tolist(), answers.tolist())
        before = np.zeros(0, dtype=np.int64)
        for tokens in session.prompt_tokens:
            before = reusing(before, len(before), tokens // SESSION_BLOCK_TOKENS, fresh)
            fresh += tokens // SESSION_BLOCK_TOKENS
            session.blocks.append(before)
        made.append(session)
    note = f"made up: {sessions} sessions that only grow, think time p50 10 s, p95 445 s"
    return trace_of_sessions("agents", made, block_tokens=SESSION_BLOCK_TOKENS, think_s_most=think_s_most, notes=[note])


def clients(number: int = 162, windows: int = 144) -> list[Client]:
    """A pool like ServeGen's m-large: top client 16 %, top ten 63 %, peak three times the mean, CV above 1."""
    random = np.random.default_rng(np.random.SeedSequence([0, 6]))
    shares = np.array([0.01, 0.5, 0.95, 0.99, 1.0])
    prompts = Quantiles(shares, np.array([73.0, 493.0, 2387.0, 8234.0, 24_355.0]))
    answers = Quantiles(shares, np.array([7.0, 150.0, 746.0, 890.0, 9307.0]))
    day = diurnal(windows, 2.98)
    made = []
    for rank, share in enumerate(shares_like(number, 0.16, 0.63).tolist(), 1):
        own = np.exp(0.3 * random.standard_normal(windows))  # windows differ by more than the day's course
        cv = np.full(windows, 1.0 + random.exponential(1.3))
        weibull = np.full(windows, random.random() < 0.2)
        made.append(Client(f"c{rank}", 196.0 * share * day * own, cv, weibull, prompts, answers))
    return made


def jobs(size: int = 28_257) -> Trace:
    """Lengths of arXiv summarisation jobs, without times."""
    asked, said = np.random.default_rng(np.random.SeedSequence([0, 7])).spawn(2)
    prompt_tokens, output_tokens = Lengths(2730, 3813, 4054).draw(asked, size), Lengths(167, 736, 4056).draw(said, size)
    return trace_of("jobs", np.zeros(size), prompt_tokens, output_tokens, notes=["made up: lengths of arXiv jobs"])
