"""Cases of an engine's life: draining, its death, a new one in its place, and closing it."""

from __future__ import annotations

import asyncio

from laneway.workers.conformance.case import Broken, case, expect
from laneway.workers.conformance.listener import DEATH_TOLD_ONCE
from laneway.workers.conformance.rig import QUESTIONS, Rig, held_of
from laneway.workers.engines.protocol import EngineGone

TURNS = 5  # of the event loop, for what an engine still has to say


@case("drain-waits", "drain is true only once no sequence is live, and false when that took too long")
async def drain_waits(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    expect(await rig.engine.drain(0.0), "drain of an idle engine was false")
    live = rig.submit(prompt, rig.lasting(prompt))
    expect(not await rig.engine.drain(0.01), "drain was true while a sequence was live")
    expect(live in rig.listener.live, "drain ended a live sequence")
    rig.engine.abort(live)
    expect(await rig.engine.drain(rig.subject.silence_s), "drain was false after the last sequence had ended")
    expect(live not in rig.listener.live, "drain was true before the end of a sequence was told of")
    short = rig.submit(prompt, 8)
    expect(await rig.engine.drain(rig.subject.silence_s), "drain was false after a short run")
    expect(short not in rig.listener.live, "drain was true before the end of a run was told of")


@case(
    DEATH_TOLD_ONCE, "An engine's death is told of once with a reason; then it takes and holds nothing", needs=("kill",)
)
async def death_told_once(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    await _die(rig, [rig.submit(prompt, rig.lasting(prompt, 2)) for _ in range(2)])
    try:
        rig.submit(prompt, 5)
    except EngineGone:
        pass
    else:
        expect(False, "a dead engine took a request")
    held = held_of(rig.engine.stats())
    expect(not held, f"of a dead engine the statistics say {held}")
    expect(await rig.engine.drain(0.0), "drain of a dead engine was false")
    for _ in range(2):
        await rig.engine.close()
    await _turns()


@case("restart", "A new engine takes the place of one that died, and goes on with its runs", needs=("kill",))
async def restart(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[4])
    live = rig.submit(prompt, rig.lasting(prompt))
    await _die(rig, [live])
    kept = rig.ids(live)
    await rig.restart()
    rest = (await rig.run([*prompt, *kept], 8)).ids
    undisturbed = (await rig.run(prompt, len(kept) + 8)).ids
    expect(bool(rest), "the new engine gave no ids")
    expect(rig.same([*kept, *rest], undisturbed), "a run resumed in a new engine went on otherwise")


@case("close-is-silent", "Closing ends live sequences without a further word, also when it is done twice")
async def close_is_silent(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    live = rig.submit(prompt, rig.lasting(prompt))
    await rig.until(lambda: bool(rig.ids(live)), "for the first ids")
    await asyncio.gather(rig.engine.close(), rig.engine.close())
    calls = rig.listener.calls
    await _turns()
    expect(rig.listener.closed is None, f"closing was told of as a death: {rig.listener.closed}")
    expect(rig.listener.calls == calls, "a closed engine told of a step")
    await rig.close()


async def _die(rig: Rig, live: list[int]) -> None:
    """Kills the engine while these run, and waits until that was told of."""
    await rig.until(lambda: all(len(rig.ids(i)) >= 2 for i in live), "for ids of what runs")
    assert rig.subject.kill is not None
    listener = rig.listener
    listener.changed.clear()
    rig.subject.kill(rig.engine)
    try:
        async with asyncio.timeout(rig.subject.silence_s):
            while listener.closed is None:
                await listener.changed.wait()
                listener.changed.clear()
    except TimeoutError:
        raise Broken("the engine's death was not told of") from None


async def _turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


CASES = (drain_waits, death_told_once, restart, close_is_silent)
