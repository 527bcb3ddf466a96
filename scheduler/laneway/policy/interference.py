"""How much lower-lane prompt an engine may be given now, so that running priority work keeps its promise.

A prompt that was submitted cannot be paused: an engine computes it in chunks, each of which makes the step of all that
decode longer, and a new priority prompt waits behind it. So the one lever is what is submitted, and when.

**Budget.** With priority jobs in the engine, a step of `b` decoding sequences takes t(b) and a chunk of C prompt tokens
adds gamma C (`StepTimes`). A share `phi` of steps that carry a chunk makes the mean time of a token t(b) + phi gamma C:

    phi_max = clamp((limit - t(b)) / (gamma C), 0.02, 1),   limit = theta x TPOT target     (isolation `strict`:
                                                            strict_factor x t(priority alone))
    credit grows by max(0.02, phi_max - phi_priority) x C / (t(b) + phi_max gamma C) tokens a second,
    to max(2 C, min(Q, 8 C))

where phi_priority is the share of a chunk that priority prompts take of a step, on average. A lower-lane slice is
submitted while credit is above 0 and costs its tokens, corrected by the time it really took; credit never falls below
-Q. What is saved up has to outlast a burst of priority prompts, which leaves nothing of several steps in a row: with
two chunks a twentieth of what the rate allows was lost beside bursts (bench/mixed_live.py). Without priority jobs in
the engine there is nobody to protect: phi_max is 1 and credit is full.
One sequence more of a lower lane is refused while t(b + 1) > limit. Both 0.02 keep a lower lane moving, and cost a
fiftieth of a chunk a step: a contract that even an idle engine cannot keep must not stop the floor of the lanes.

**Guard of first tokens.** Also with no priority job in the engine, lower-lane tokens submitted and not yet computed are
at most

    Q = guard_fraction x TTFT target / (gamma + t(b) / C)      (in whole KV blocks, at least one; `strict`: one chunk)

**Slices.** A longer prompt is computed in slices through the prefix cache: of Q, or while priority jobs are here or
were lately of what a step's chunk has left (C less what decodes, less priority's prompts that are on their way; never
more than Q), one in flight. Priority's prompts may leave nothing for as long as they like: then a block goes whenever
credit is full, which it comes to be by its fiftieth at least. Smaller slices cost throughput (a quarter of the TPOT
was measured on the embedded engine) and save a factor of 8 of the slowest first tokens and 2 of the slowest tokens.
Without prefix reuse a prompt can only be submitted whole: on a pool marked bulk once it has credit for all but Q of it,
on any other while no priority job is here or was lately, or once it has waited long (the caller says when).

**Long prompts of priority** delay each other's tokens the same way. One of more than a chunk is submitted whole unless
its steps would break the TPOT of somebody who decodes: gamma x tokens > min over these of

    share x target x (made + left) - elapsed - left x t(b)        (share: theta, or 1 of a strict one's target)

Then it goes in slices of a chunk, at the pace at which tokens stay at their limit, or at that which its own TTFT target
needs (0.8 of the time that is left), whichever is faster. Its own promise counts as much as theirs.

**Theta** starts at its setting and is moved every 10 s by what was measured: -0.05 if the 95th percentile of
TPOT / target of priority work was above 1, else +0.01, within [theta_min, theta_max]. Without measurements it stays.

Urgent deferrable work does not bypass any of this: in the reference's simulations the bypass cost priority 48 points of
attainment and bought deferrable work nothing. Units: seconds and tokens. Source: reference policy (b5) and its TTFT
guard, measured on a real engine there (3b). Not in the reference: more credit than two chunks, and the guard's
t(b) / C, since an engine whose steps take as long without prompts as with them still needs a step a chunk.
Complexity: O(1); `long_prompt` O(decoding runs). Failure modes: a wrong fit for some seconds (the outer loop and the
measured charge correct it); TPOT targets below what the engine can do at all leave lower lanes the fiftieth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec import Struct

from laneway.core.fleet import StepTimes

PHI_MIN = 0.02
DEPTH_CHUNKS, DEPTH_CHUNKS_MOST = 2, 8  # that credit may save up
CHUNK_TOKENS = 512  # where an engine does not say what it takes of a prompt in a step
GUARD_TOKENS_MOST = 1 << 20
THETA_STEP_S = 10.0
THETA_DOWN, THETA_UP = 0.05, 0.01
OWN_TTFT_SHARE = 0.8  # of the time left to its TTFT target, what a priority prompt in slices plans to take

OPEN, BUDGET, GUARD, TPOT, HEADROOM = "OPEN", "BUDGET", "GUARD", "TPOT", "HEADROOM"


@dataclass(frozen=True, slots=True)
class InterferenceParams:
    budget: bool = True  # off: lower lanes have one prompt at a time, whole, whatever priority feels
    slices: bool = True  # off: prompts are submitted whole, lower-lane ones once they have credit
    theta: float = 0.8  # share of the TPOT target that priority work may be brought to, to begin with
    theta_min: float = 0.5
    theta_max: float = 0.9
    guard_fraction: float = 0.25  # of a TTFT target, what lower-lane prompts may take of it
    strict_factor: float = 1.05  # what isolation `strict` allows a token to take, of its time with priority work alone
    lower_prefills_max: int = 1  # lower-lane jobs without their first token

    def __post_init__(self) -> None:
        if not 0.0 < self.theta_min <= self.theta <= self.theta_max <= 1.0:
            raise ValueError("theta must lie from theta_min to theta_max, within 0 and 1")
        if not 0.0 < self.guard_fraction <= 1.0:
            raise ValueError("guard_fraction must be above 0 and at most 1")
        if not self.strict_factor >= 1.0:
            raise ValueError("strict_factor must be at least 1")
        if not self.lower_prefills_max >= 1:
            raise ValueError("lower_prefills_max must be at least 1")


class Load(Struct, frozen=True):
    """An engine at one moment, as far as the budget is concerned."""

    times: StepTimes
    tpot_target_s: float  # the tightest of the priority jobs here, or lately here; else the lane's default
    ttft_target_s: float  # the same
    block_tokens: int = 1  # of the prefix cache
    decoding: int = 0  # sequences of all lanes that have their first token
    context_tokens: int = 0  # KV that these hold
    priority: int = 0  # priority jobs in the engine, those without a token included
    priority_decoding: int = 0
    priority_context: int = 0
    recent: bool = False  # priority jobs are here or were a moment ago
    strict: bool = False  # one of those asks for strict isolation
    phi_priority: float = 0.0  # share of a step's chunk that priority prompts take
    lower_prompt_tokens: int = 0  # of lower lanes: submitted and not yet computed
    priority_prompt_tokens: int = 0  # the same of priority

    @property
    def chunk_tokens(self) -> int:
        """Of prompts in a step, in whole blocks. What decodes takes its tokens of the same step first: a slice of the
        whole chunk would need a second step for its last tokens."""
        return blocks((self.times.chunk_tokens or CHUNK_TOKENS) - self.decoding, self.block_tokens)

    @property
    def step_s(self) -> float:
        """Of the decoding sequences, without prompts."""
        return self.times.decode_s(self.decoding, self.context_tokens)


def limit_s(load: Load, theta: float, params: InterferenceParams) -> float:
    """What a step may take on average while priority jobs are here."""
    if load.strict:
        alone = max(1, load.priority_decoding)
        return params.strict_factor * load.times.decode_s(alone, load.priority_context)
    return theta * load.tpot_target_s


def phi_max(load: Load, theta: float, params: InterferenceParams) -> float:
    """Share of steps that may carry a chunk of prompt, whoever's."""
    chunk_s = load.times.prefill_token_s * load.chunk_tokens
    if not load.priority or chunk_s <= 0.0:
        return 1.0
    return _clamp((limit_s(load, theta, params) - load.step_s) / chunk_s, PHI_MIN, 1.0)


def credit_step(load: Load, theta: float, params: InterferenceParams) -> float:
    """Prompt tokens that the lower lanes may have of a step, on average."""
    share = max(PHI_MIN, phi_max(load, theta, params) - load.phi_priority) if load.priority else 1.0
    return share * load.chunk_tokens


def credit_rate(load: Load, theta: float, params: InterferenceParams) -> float:
    """Prompt tokens a second that the lower lanes may have."""
    step_s = load.step_s + phi_max(load, theta, params) * load.times.prefill_token_s * load.chunk_tokens
    return credit_step(load, theta, params) / max(step_s, 1e-6)


def guard_tokens(load: Load, params: InterferenceParams) -> int:
    """Q: most lower-lane tokens that are submitted and not yet computed, and the deepest debt."""
    token_s = load.times.prefill_token_s + load.step_s / load.chunk_tokens
    most = params.guard_fraction * load.ttft_target_s / max(token_s, 1e-9)
    if load.strict:
        most = min(most, load.chunk_tokens)
    return blocks(min(most, GUARD_TOKENS_MOST), load.block_tokens)


def blocks(tokens: float, block_tokens: int) -> int:
    """So many tokens in whole blocks, at least one."""
    return max(1, int(tokens) // block_tokens) * block_tokens


def depth_tokens(load: Load, params: InterferenceParams) -> int:
    """Most credit that is saved up: as much as may be owed, within some chunks."""
    chunk = load.chunk_tokens
    return max(DEPTH_CHUNKS * chunk, min(DEPTH_CHUNKS_MOST * chunk, guard_tokens(load, params)))


def refilled(
    credit: float, passed_s: float, load: Load, theta: float, params: InterferenceParams, depth: float = 0.0
) -> float:
    """Credit after a time. `depth`: more than usual may be saved up, for a prompt that can only be submitted whole."""
    depth = max(depth, depth_tokens(load, params))
    if not load.priority:
        return depth
    credit = max(credit, float(-guard_tokens(load, params)))
    return min(max(depth, credit), credit + passed_s * credit_rate(load, theta, params))


def charged(credit: float, tokens: float, load: Load, params: InterferenceParams) -> float:
    """Credit after so many tokens, or fewer than were thought (below 0); never below -Q."""
    return max(float(-guard_tokens(load, params)), credit - tokens)


# --- what a lower-lane job may do --------------------------------------------------------------------


class Prompt(Struct, frozen=True):
    """What is left to compute of a lower-lane prompt."""

    left: int  # tokens
    in_slices: bool = True  # the engine finds again what it computed of a prompt
    bulk: bool = False  # it may be submitted whole where it cannot be sliced


def may_submit(prompt: Prompt, credit: float, load: Load, params: InterferenceParams) -> int:
    """How many of its next tokens may be submitted now; `prompt.left`: all of them; 0: none.

    What is less than all of them is a multiple of the block. Only one slice is to be in flight at a time.
    """
    if not params.budget:
        return prompt.left
    guard = guard_tokens(load, params)
    most = guard
    if load.recent:
        spare = load.chunk_tokens - load.priority_prompt_tokens
        most = min(guard, max(spare, load.block_tokens if credit >= depth_tokens(load, params) else 0))
    room = most - load.lower_prompt_tokens
    if load.priority:
        room = min(room, int(credit + guard)) if credit > 0.0 else 0
    if room >= prompt.left:
        return prompt.left
    if prompt.in_slices:
        return blocks(room, load.block_tokens) if room >= load.block_tokens else 0
    if load.lower_prompt_tokens:
        return 0
    if not load.recent or (prompt.bulk and credit >= credit_needed(prompt, load, params)):
        return prompt.left
    return 0


def credit_needed(prompt: Prompt, load: Load, params: InterferenceParams) -> float:
    """What must have been saved up for a prompt that is submitted whole: all that would go beyond the debt."""
    return max(1.0, float(prompt.left - guard_tokens(load, params))) if prompt.bulk and not prompt.in_slices else 0.0


def join_in_s(credit: float, load: Load, theta: float, params: InterferenceParams) -> float | None:
    """When credit will do for one more job to start; None: it does."""
    missing = -credit - credit_step(load, theta, params)
    return max(missing, 1e-3) / credit_rate(load, theta, params) if load.priority and missing >= 0.0 else None


def may_join(credit: float, prefilling: int, load: Load, theta: float, params: InterferenceParams) -> str:
    """Whether one more lower-lane job may start: OPEN, or what is in the way. `prefilling`: lower-lane jobs here
    without their first token, whether or not any of it was submitted. Credit for the next step will do: the job has to
    be here by then, and shares a step with the last slice of the one before."""
    if prefilling >= params.lower_prefills_max:
        return GUARD
    if not params.budget:
        return OPEN
    if load.lower_prompt_tokens >= guard_tokens(load, params):
        return GUARD
    if load.priority:
        more_s = load.times.decode_s(load.decoding + 1, load.context_tokens)
        if more_s > limit_s(load, theta, params):
            return TPOT
        if credit + credit_step(load, theta, params) <= 0.0:
            return BUDGET
    return OPEN


def floor_may_join(credit: float, prefilling: int, load: Load, params: InterferenceParams) -> bool:
    """The same for a job that the lanes' floor starts: neither the TPOT of one sequence more nor credit keeps it away,
    as long as it is not in full debt. What it may submit then is `may_submit`'s, as for any other."""
    if prefilling >= params.lower_prefills_max:
        return False
    guard = guard_tokens(load, params)
    return not params.budget or (load.lower_prompt_tokens < guard and (not load.priority or credit > -guard))


# --- long prompts of priority ------------------------------------------------------------------------


class Decoder(Struct, frozen=True):
    """A run that has its first token, of whatever lane."""

    made: int  # tokens so far
    left: int  # tokens still to come, as far as is known
    elapsed_s: float  # since its first token
    tpot_target_s: float
    strict: bool = False


class Pace(Struct, frozen=True):
    """How a long priority prompt is submitted: so many tokens at a time, and a second. 0 a second: whole, now."""

    slice_tokens: int
    tokens_per_s: float = 0.0


def long_prompt(
    left: int, time_left_s: float, sharing: int, decoders: Iterable[Decoder], load: Load, params: InterferenceParams,
    theta: float,
) -> Pace:  # fmt: skip
    """The pace of a priority prompt with `left` tokens to compute and so much time to its TTFT target, while `sharing`
    such prompts, itself included, are in slices."""
    whole, times, chunk = Pace(left), load.times, blocks(load.chunk_tokens, load.block_tokens)
    others = tuple(decoders)
    if not (params.budget and params.slices) or left <= chunk or not others or times.prefill_token_s <= 0.0:
        return whole
    step_s, token_s = load.step_s, times.prefill_token_s
    if token_s * left <= min(_spare_s(decoder, step_s, theta, params) for decoder in others):
        return whole
    chunk_s = token_s * chunk
    limits = min(_limit_s(decoder, step_s, theta, params) for decoder in others)
    phi = _clamp((limits - step_s) / chunk_s, PHI_MIN, 1.0) / max(1, sharing)
    spare_s = OWN_TTFT_SHARE * time_left_s - token_s * left
    if spare_s <= 0.0:
        return whole
    phi = max(phi, math.ceil(left / chunk) * step_s / spare_s)
    if phi >= 1.0:
        return whole
    return Pace(chunk, phi * chunk / max(1e-6, step_s + phi * chunk_s))


def _limit_s(decoder: Decoder, step_s: float, theta: float, params: InterferenceParams) -> float:
    return params.strict_factor * step_s if decoder.strict else theta * decoder.tpot_target_s


def _spare_s(decoder: Decoder, step_s: float, theta: float, params: InterferenceParams) -> float:
    """What its remaining tokens may take in all, beyond what they take without prompts."""
    limit = _limit_s(decoder, step_s, theta, params)
    if decoder.strict:
        return decoder.left * (limit - step_s)
    return limit * (decoder.made + decoder.left) - decoder.elapsed_s - decoder.left * step_s


# --- the outer loop ----------------------------------------------------------------------------------


def next_theta(theta: float, tpot_p95: float | None, passed_s: float, params: InterferenceParams) -> float:
    """Theta after a look at what priority work got. `tpot_p95`: of TPOT / target; None: nothing was measured."""
    if tpot_p95 is None:
        return _clamp(theta, params.theta_min, params.theta_max)
    moved = -THETA_DOWN if tpot_p95 > 1.0 else THETA_UP * passed_s / THETA_STEP_S
    return _clamp(theta + moved, params.theta_min, params.theta_max)


def _clamp(value: float, least: float, most: float) -> float:
    return max(least, min(most, value))
