"""The conformance kit is held to its word: each planted defect is caught by its case.

That sound engines pass it is in test_engines.py.
"""

from __future__ import annotations

import ast
import dataclasses
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace

import laneway.workers.conformance
from laneway.core.catalogue import Pool
from laneway.core.lanes import FinishReason
from laneway.runtime.catalogue import capabilities_of
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import load_tokenizer
from laneway.workers.conformance.kit import CASES, Outcome, Report, run_kit
from laneway.workers.conformance.listener import Breach, Listener
from laneway.workers.conformance.subject import Subject
from laneway.workers.engines.protocol import Engine, EngineRequest, EngineStats, SequenceStep
from laneway.workers.engines.registry import spec_of
from laneway.workers.engines.simulated import make_core
from laneway.workers.engines.simulated_inline import InlineEngine
from tests.support import planted_defects as planted
from tests.support.planted_defects import Sound

SIMULATED = EngineOptions(pace_s=0.002, alphabet="unicode", eos_mean_tokens=30.0, prefill_chunk_tokens=64)


def pool() -> Pool:
    return Pool(
        name="under-test",
        model="chat",
        tier="small",
        engine="simulated",
        context_length=2048,
        vocabulary_size=260,
        slots=16,
        workers=1,
        kv_tokens=16_384,
        tokenizer="bytes",
        # It finds its draws in the ids, which it says to nobody else.
        capabilities=replace(capabilities_of("simulated"), resumable_sampling=True),
    )


def inline(options: EngineOptions = SIMULATED) -> InlineEngine:
    spec = spec_of(pool(), options)
    return InlineEngine(make_core(spec.capacity, frozenset(spec.eos_ids), spec.options), spec.capabilities)


def kill(engine: Engine) -> None:
    inner = engine.inner if isinstance(engine, Sound) else engine
    assert isinstance(inner, InlineEngine)
    inner.crash("killed by the kit")


def subject_with(defect: type[Sound]) -> Subject:
    numbers = count(1)
    return Subject(
        make=lambda: defect(inline(), next(numbers)),
        tokenizer=load_tokenizer("bytes"),
        can=pool().capabilities,
        kill=kill,
    )


def unsound(report: Report) -> dict[str, str]:
    """All but what passed, and why."""
    return {r.case: f"{r.outcome}: {r.message}" for r in report.results if r.outcome is not Outcome.PASSED}


# The defect, the case that must find it, and words of what it must have seen.
PLANTED: tuple[tuple[type[Sound], str, str], ...] = (
    (planted.AllAtTheEnd, "streams-as-made", "24 ids came in 1 call"),
    (planted.FinishToldTwice, "ends-once", "a second end, length,"),
    (planted.DeltaAfterFinish, "ends-once", "a delta of a sequence that had ended with length"),
    (planted.TokenAfterAbort, "ends-once", "a delta of a sequence that had ended with cancelled"),
    (planted.LastChunkLost, "length-exact", "32 ids at finish length of max_tokens 33"),
    (planted.OneCallPerSequence, "one-call-per-step", "in 80 calls"),
    (planted.HeldTailLost, "stop-token", "5 ids came before the stop token; there are 6"),
    (planted.EndTokenGiven, "end-token-hidden", "an end token was given out"),
    (planted.CompanyShows, "company-changes-nothing", "differ in company"),
    (planted.ResumeRepeatsToken, "resume", "resumed after 1 ids"),
    (planted.SeedDrawsFromTheStart, "resume-sampled", "resumed after 1 ids, the run drew others"),
    (planted.PriorityIgnored, "priority-first", "the lower priority, which came first"),
    (planted.SplitCharacters, "characters-whole", "an unfinished character is inside"),
    (planted.LongRunsSwapIds, "stop-string-across-ids", "the stop string"),
    (planted.LogprobsMissing, "logprob-per-id", "0 log probabilities for 1 ids"),
    (planted.LogprobForEverySecondId, "logprob-per-id", "6 log probabilities, 12 ids"),
    (planted.ProbabilitiesForLogprobs, "logprob-per-id", "above 0"),
    (planted.OneAlternativeShort, "top-logprobs", "[4] alternatives"),
    (planted.SeedIgnored, "seed-repeats-alone", "gave 3 texts"),
    (planted.SeedOfCompany, "seed-repeats-in-company", "differ from the one alone"),
    (planted.OneSeedForAll, "seeds-differ", "5 seeds gave 1 texts"),
    (planted.UnknownAbilityIgnored, "abilities-kept", "logit_bias is not offered and was not refused"),
    (planted.ContextOneShort, "context-fits", "it was refused"),
    (planted.LongPromptCut, "context-exceeded", "in a context of 2048 ended with length"),
    (planted.PromptCutInside, "prompt-whole", "512 were computed"),
    (planted.BadRequestEndsEngine, "bad-input-alone", "the engine ended (a step raised)"),
    (planted.BadRequestEndsOthers, "bad-input-alone", "answered otherwise"),
    (planted.WordsOfALibrary, "errors-in-our-words", "generation_config.cpp"),
    (planted.CachedBeyondPrompt, "cached-within-prompt", "cached tokens of a prompt of"),
    (planted.CacheUntold, "prefix-found", "0 of 700 tokens were found again"),
    (planted.AbortWaitsForFirstToken, "abort-queued", "ran although all slots were taken"),
    (planted.AbortWaitsForPrefill, "abort-prefilling", "aborted while prefilling gave ids"),
    (planted.AbortIgnored, "abort-decoding", "ended with length"),
    (planted.AbortOfEndedStrikesNext, "abort-finished", "answered otherwise"),
    (planted.AbortOfUnknownEndsAll, "abort-unknown", "another run ended with cancelled"),
    (planted.AbortsDropped, "abort-200", "136 of 200 aborted runs"),
    (planted.SlotLeaked, "recount", "a recount gives"),
    (planted.CountersFall, "counts-grow", "prefilled_tokens fell"),
    (planted.TokensCountedTwice, "counts-true", "decoded tokens were told"),
    (planted.KvLeaked, "rest-is-zero", "kv_tokens_used"),
    (planted.SubmittedUncounted, "submitted-is-counted", "0 of 3"),
    (planted.DrainReturnsEarly, "drain-waits", "while a sequence was live"),
    (planted.DeathToldTwice, "death-told-once", "told of twice"),
    (planted.DeathUntold, "death-told-once", "was not told of"),
    (planted.NewEngineForgetsLastId, "restart", "went on otherwise"),
    (planted.StartsOnce, "restart", "EngineStartError: the port is taken"),
    (planted.CloseToldAsDeath, "close-is-silent", "told of as a death"),
)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("defect", "case", "seen"), PLANTED, ids=[f"{defect.__name__}-{case}" for defect, case, _ in PLANTED]
)
async def test_a_planted_defect_is_caught_by_its_case(defect: type[Sound], case: str, seen: str):
    report = await run_kit(subject_with(defect))
    found = report.of(case)
    assert found.outcome is Outcome.FAILED, f"only these failed: {report.failed}"
    assert seen in found.message
    assert len(report.results) == len(CASES), "what one case did to the engine kept no other from being asked"


@pytest.mark.looptime
async def test_what_carries_the_defects_has_none_itself():
    assert unsound(await run_kit(subject_with(Sound))) == {}


def test_every_case_catches_a_planted_defect():
    assert {case for _, case, _ in PLANTED} == {case.name for case in CASES}


def test_every_planted_defect_is_tried():
    defects = {kind for kind in vars(planted).values() if isinstance(kind, type) and issubclass(kind, Sound)}
    assert {defect for defect, _, _ in PLANTED} == defects - {Sound}


def test_names_of_cases_are_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.looptime
async def test_what_an_engine_does_not_offer_is_never_passed():
    subject = Subject(inline, load_tokenizer("bytes"), capabilities_of("openvino"))
    report = await run_kit(subject, [case for case in CASES if case.needs])
    lacking = {"top_logprobs", "exact", "kill", "resumable_sampling"}
    expected = {case.name for case in CASES if lacking & set(case.needs)}
    assert {r.case for r in report.results if r.outcome is Outcome.NOT_OFFERED} == expected
    assert report.of("resume").message == "needs exact"
    assert report.failed == []


@pytest.mark.looptime
async def test_text_that_becomes_ids_has_no_exact_length_yet_is_never_too_long():
    can = replace(pool().capabilities, token_ids_out=False)
    subject = dataclasses.replace(subject_with(planted.LastChunkLost), can=can)
    found = (await run_kit(subject)).of("length-exact")
    assert (found.outcome, found.message) == (Outcome.NOT_OFFERED, "needs token_ids_out")
    breaches: list[Breach] = []
    listener = Listener(breaches, own_ids=False)
    for request_id, ids in ((1, [65]), (2, [65, 66, 67])):
        listener.expect(EngineRequest(request_id, (1,), 2))
        listener.on_step([SequenceStep(request_id, ids, finish=FinishReason.LENGTH)], EngineStats())
    assert [breach.message for breach in breaches if breach.case == "length-exact"] == [
        "3 ids at finish length of max_tokens 2"
    ]


def test_the_kit_needs_no_pytest():
    modules = list(Path(laneway.workers.conformance.__file__).parent.glob("*.py"))
    assert len(modules) > 8
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert "pytest" not in [*names, getattr(node, "module", "")], module.name
