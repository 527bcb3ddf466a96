"""Cases of what a stream of ids is: its order, its end, how many ids, and that nobody's company shows in it."""

from __future__ import annotations

from laneway.core.lanes import FinishReason
from laneway.workers.conformance.case import NotOffered, case, expect
from laneway.workers.conformance.listener import ENDS_ONCE, LENGTH_EXACT, ONE_CALL_PER_STEP
from laneway.workers.conformance.rig import QUESTIONS, Rig


@case("streams-as-made", "Ids are told of while the run goes on, not all of them at its end")
async def streams_as_made(rig: Rig) -> None:
    heard = await rig.run(rig.prompt(QUESTIONS[0]), 24)
    expect(len(heard.chunks) > 1, f"{len(heard.ids)} ids came in {len(heard.chunks)} call")


@case(ENDS_ONCE, "A sequence has one end, after its last id; nothing follows, and nothing is told of others' ids")
async def ends_once(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[0])
    aborted = rig.submit(prompt, rig.lasting(prompt))
    await rig.ended([rig.submit(prompt, tokens) for tokens in (1, 2, 9)])
    await rig.stop([aborted])
    await rig.run(prompt, 4)  # what follows an end by mistake has come by the end of this


@case(
    LENGTH_EXACT,
    "At finish LENGTH exactly max_tokens ids were given: the first and the last among them",
    needs=("token_ids_out",),
)
async def length_exact(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[1])
    for tokens in (1, 2, 33):
        heard = await rig.run(prompt, tokens)
        by_itself = heard.finish is FinishReason.STOP and not rig.can.ignore_eos
        expect(heard.finish is FinishReason.LENGTH or by_itself, f"a run of {tokens} tokens ended with {heard.finish}")


@case(ONE_CALL_PER_STEP, "All sequences of a step come in one call of the sink, each once")
async def one_call_per_step(rig: Rig) -> None:
    before = rig.listener.calls
    with rig.engine.together():
        together = [rig.submit(rig.prompt(question), 10) for question in QUESTIONS]
    deltas = sum(len(heard.chunks) for heard in await rig.ended(together))
    calls = rig.listener.calls - before
    expect(calls <= deltas / 2, f"{deltas} deltas of {len(together)} sequences came in {calls} calls")


@case("stop-token", "A stop token ends its run with STOP, is not given out, and all ids before it are")
async def stop_token(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[2])
    whole = (await rig.run(prompt, 12)).ids
    expect(len(whole) > 1, f"{len(whole)} ids came of 12")
    stop = whole[len(whole) // 2]
    heard = await rig.run(prompt, 12, stop_token_ids=(stop,), logprobs=rig.can.logprobs)
    expect(stop not in heard.ids, "the stop token was given out")
    if rig.can.exact:
        before = whole[: whole.index(stop)]
        expect(heard.finish is FinishReason.STOP, f"the run ended with {heard.finish}, not at its stop token")
        expect(heard.ids == before, f"{len(heard.ids)} ids came before the stop token; there are {len(before)}")


@case("end-token-hidden", "An answer that ends by itself says STOP, and its end token is not among the ids")
async def end_token_hidden(rig: Rig) -> None:
    prompt = rig.prompt("Say hello in one word.")
    heard = await rig.run(prompt, rig.lasting(prompt, tokens=300), ignore_eos=False)
    expect(not rig.subject.tokenizer.eos_ids & set(heard.ids), "an end token was given out")
    expect(heard.finish in (FinishReason.STOP, FinishReason.LENGTH), f"the run ended with {heard.finish}")


@case("company-changes-nothing", "A greedy answer is the same alone and in a batch", needs=("exact",))
async def company_changes_nothing(rig: Rig) -> None:
    alone = [(await rig.run(rig.prompt(question), 12)).ids for question in QUESTIONS]
    shorter = [rig.submit(rig.prompt(question), 12) for question in QUESTIONS]
    longer = [rig.submit(rig.prompt(question), 20) for question in QUESTIONS]
    for ids in (shorter, longer):
        together = [heard.ids[:12] for heard in await rig.ended(ids)]
        changed = sum(one != other for one, other in zip(alone, together, strict=True))
        expect(not changed, f"{changed} of {len(alone)} answers differ in company")


@case("resume", "A run that is given its prompt and its ids so far goes on as if undisturbed", needs=("exact",))
async def resume(rig: Rig) -> None:
    prompt = rig.prompt(QUESTIONS[4])
    whole = (await rig.run(prompt, 24)).ids
    for kept in (1, 9, 23):
        rest = (await rig.run([*prompt, *whole[:kept]], 24 - kept)).ids
        expect(rest == whole[kept:], f"resumed after {kept} ids, the run gave others than undisturbed")


@case(
    "resume-sampled", "A seeded run that is given its ids so far draws on as if undisturbed",
    needs=("resumable_sampling", "seed"),
)  # fmt: skip
async def resume_sampled(rig: Rig) -> None:
    prompt, drawing = rig.prompt(QUESTIONS[4]), {"seed": 7, "temperature": 1.0}
    whole = (await rig.run(prompt, 24, **drawing)).ids
    for kept in (1, 9, 23):
        rest = (await rig.run([*prompt, *whole[:kept]], 24 - kept, **drawing)).ids
        expect(rest == whole[kept:], f"resumed after {kept} ids, the run drew others than undisturbed")


@case("priority-first", "Of what waits inside, the higher priority is taken first", needs=("priority_inside",))
async def priority_first(rig: Rig) -> None:
    slots, prompt = rig.capacity.slots, rig.prompt(QUESTIONS[0])
    running = [rig.submit(prompt, rig.lasting(prompt, slots + 1, 400), priority=1.0) for _ in range(slots)]
    await rig.until(lambda: all(rig.ids(i) for i in running), "for all slots to run")
    low, high = (rig.submit(prompt, 4, priority=priority) for priority in (0.0, 1.0))
    full = rig.listener.live.issuperset(running)
    await rig.stop(running[:1])  # room for one
    await rig.until(lambda: bool(rig.ids(low) or rig.ids(high)), "for one of two that wait")
    first = high if rig.ids(high) else low
    both = bool(rig.ids(low)) and bool(rig.ids(high))
    await rig.stop(running[1:])
    await rig.ended([low, high])
    if not full or both:
        raise NotOffered("the runs that were to fill all slots were too short")
    expect(first == high, "the lower priority, which came first, was taken before the higher")


CASES = (
    streams_as_made,
    ends_once,
    length_exact,
    one_call_per_step,
    stop_token,
    end_token_hidden,
    company_changes_nothing,
    resume,
    resume_sampled,
    priority_first,
)
