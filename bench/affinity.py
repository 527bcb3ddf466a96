"""How much of what was said before comes from a worker's cache: home slots against one cache of all workers' size.

Two workers; 16 sessions of 5 turns, each turn's prompt being all before it and something new. The reference is a
prefix cache of both workers' size together that all prompts pass in their order; the same without home slots stands
beside it. With the real engine (OpenVINO, SmolLM2) 4 turns are under way at once, with the simulated one 16. Then a
worker is killed between two turns and stays away: a cold turn is one that finds less than half of what the reference
finds. Then 96 jobs share their first 512 tokens and name no session, 16 at once: how many each worker runs. `cached`
of the real engine is a lower bound, in whole blocks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from report import Bar, Report, main

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the drills' own helpers

from tests.support.affinity_play import (
    OPENVINO,
    SESSIONS,
    SIMULATED,
    TURNS,
    WORKERS,
    Engine,
    Place,
    Play,
    Turn,
    cold_turns,
    hot,
    place,
    reuse,
)

REUSE_MIN = 0.85
COLD_MAX = 1.0
HOT_RATIO_MAX = 1.5
HOT_JOBS, HOT_AT_ONCE, HOT_PREFIX = 96, 16, 512
BEFORE_KILL, AFTER_KILL = 2, 3  # turns
LIMIT_S = 900.0


@dataclass
class Case:
    """What one engine's runs gave."""

    engine: Engine
    homes: list[Turn]
    without: list[Turn]
    after_kill: list[Turn]
    hot_jobs: list[int]  # by worker

    @property
    def cold_worst(self) -> int:
        return max(cold_turns(self.after_kill).values(), default=0)

    @property
    def hot_ratio(self) -> float:
        return max(self.hot_jobs) / (sum(self.hot_jobs) / WORKERS)


async def talk(here: Place, engine: Engine, sessions: int, turns: int, seed: int) -> list[Turn]:
    return await Play(engine, seed).talk(here.client, sessions, turns)


async def talk_and_kill(here: Place, engine: Engine, sessions: int, turns: tuple[int, int]) -> list[Turn]:
    """The turns after a worker was killed, which is not started again."""
    play = Play(engine, seed=3)
    await play.talk(here.client, sessions, turns[0])
    worker = here.stack.workers[0]
    worker.kill()
    await worker.wait()
    return await play.talk(here.client, sessions, turns[1])


async def share_out(here: Place, engine: Engine, jobs: int) -> list[int]:
    before = await here.jobs_by_worker()
    await hot(Play(engine, seed=2), here.client, jobs, HOT_PREFIX, HOT_AT_ONCE)
    after = await here.jobs_by_worker()
    return [after[name] - before[name] for name in sorted(after)]


async def run(engine: Engine, *, smoke: bool) -> Case:
    sessions, turns, jobs = (4, 2, 8) if smoke else (SESSIONS, TURNS, HOT_JOBS)
    async with place(engine, homes=False) as here:
        without = await talk(here, engine, sessions, turns, seed=1)
    async with place(engine) as here:
        homes = await talk(here, engine, sessions, turns, seed=1)
        shared = await share_out(here, engine, jobs)
        after = await talk_and_kill(here, engine, sessions, (1, 1) if smoke else (BEFORE_KILL, AFTER_KILL))
    return Case(engine, homes, without, after, shared)


async def measure(smoke: bool) -> Report:
    cases = [await run(engine, smoke=smoke) for engine in ((SIMULATED,) if smoke else (SIMULATED, OPENVINO))]
    columns = ["engine", "reuse", "without homes", "of all prompt tokens", "cold after a kill, a session", "hot, jobs"]
    report = Report("Prompt tokens from caches, of those that one cache would have", columns, [], {})
    for case in cases:
        name = case.engine.name
        share = sum(t.cached_tokens for t in case.homes) / sum(t.prompt_tokens for t in case.homes)
        report.rows.append(
            [
                f"{name}, {case.engine.at_once} at once",
                f"{reuse(case.homes):.1%}",
                f"{reuse(case.without):.1%}",
                f"{share:.1%}",
                f"{case.cold_worst} at most, {sum(cold_turns(case.after_kill).values())} in all",
                f"{case.hot_jobs} ({case.hot_ratio:.2f}x)",
            ]
        )
        report.figures |= {
            f"{name}_reuse": reuse(case.homes),
            f"{name}_reuse_without_homes": reuse(case.without),
            f"{name}_cached_share": share,
            f"{name}_cold_turns_max": float(case.cold_worst),
            f"{name}_cold_turns": float(sum(cold_turns(case.after_kill).values())),
            f"{name}_hot_ratio": case.hot_ratio,
        }
        if case.engine is OPENVINO:  # what is stolen depends on what a prompt costs: no bar on what we make up
            report.bars.append(
                Bar("reuse of what one cache would reuse", reuse(case.homes), REUSE_MIN, "of it", at_least=True)
            )
        report.bars += [
            Bar(f"{name}: cold turns of a session after a kill", float(case.cold_worst), COLD_MAX, "turns"),
            Bar(f"{name}: a hot prefix at one worker, over the mean", case.hot_ratio, HOT_RATIO_MAX, "x"),
        ]
        sessions, turns = (4, 2) if smoke else (SESSIONS, TURNS)
        report.counts |= {
            f"{name}: turns": (len(case.homes), sessions * turns),
            f"{name}: jobs of the hot prefix": (sum(case.hot_jobs), 8 if smoke else HOT_JOBS),
            f"{name}: turns after the kill": (len(case.after_kill), sessions * (1 if smoke else AFTER_KILL)),
        }
    report.notes.append(f"{WORKERS} workers, {SESSIONS} sessions of {TURNS} turns; the killed worker stays away")
    return report


if __name__ == "__main__":
    main(measure, __doc__ or "", limit_s=LIMIT_S)
