"""What a request asks for against what its model has room for, and what a call's own time limit does to the promise."""

from __future__ import annotations

from msgspec.structs import replace

from laneway.core.catalogue import Pool
from laneway.core.errors import InvalidRequest
from laneway.core.job import Contract

# An attached caller's own timer runs out at the call's deadline; ours runs out a little earlier, so that the status
# that names the phase arrives before the caller's library makes up its own.
CALL_MARGIN_S = 0.05
CALL_MARGIN_RATIO = 0.05


def bounded_by_call(contract: Contract, now_s: float, time_remaining_s: float | None) -> Contract:
    """The contract of an attached job: due at the earlier of its own deadline and the call's."""
    if time_remaining_s is None:
        return contract
    margin = min(CALL_MARGIN_S, CALL_MARGIN_RATIO * max(0.0, time_remaining_s))
    due = now_s + time_remaining_s - margin
    return replace(contract, deadline_s=due) if due < contract.deadline_s else contract


def output_room(pool: Pool, prompt_tokens: int, max_tokens: int | None) -> int:
    """Most tokens of the answer: what was asked for, or the pool's default cut to what the context leaves.

    Raises InvalidRequest with both numbers where prompt and answer do not fit the context.
    """
    room = pool.context_length - prompt_tokens
    if room < 1:
        raise beyond_context(pool, str(prompt_tokens), prompt_tokens)
    if max_tokens is None:
        return min(pool.max_tokens_default, room)
    if max_tokens > room:
        raise InvalidRequest(
            f"prompt ({prompt_tokens} tokens) and max_tokens ({max_tokens}) exceed the context of "
            f"{pool.context_length} tokens",
            field="spec.generate.sampling.max_tokens",
            reason="CONTEXT_LENGTH_EXCEEDED",
            facts={
                "prompt_tokens": str(prompt_tokens),
                "max_tokens": str(max_tokens),
                "context_length": str(pool.context_length),
            },
        )
    return max_tokens


def beyond_context(pool: Pool, said: str, prompt_tokens: int) -> InvalidRequest:
    """`said`: the number in words, such as "at least 20000"."""
    return InvalidRequest(
        f"the prompt has {said} tokens; the context of {pool.context_length} must also hold the answer",
        field="spec.generate.prompt",
        reason="CONTEXT_LENGTH_EXCEEDED",
        facts={"prompt_tokens": str(prompt_tokens), "context_length": str(pool.context_length)},
    )


def within_reach(contract: Contract, ttft_default_s: float, idle_ttft_s: float) -> Contract:
    """A TTFT target that the caller did not choose grows with the prompt: no default may rule a long prompt out."""
    if contract.ttft_target_s == ttft_default_s and 2.0 * idle_ttft_s > ttft_default_s:
        return replace(contract, ttft_target_s=2.0 * idle_ttft_s)
    return contract
