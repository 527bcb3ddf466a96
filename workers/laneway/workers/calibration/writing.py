"""From what was measured to a profile: tables without gaps, and the step times of the policy."""

from __future__ import annotations

from msgspec.structs import replace

from laneway.core.fleet import StepTimes
from laneway.policy.step_prior import fit_steps, relative_errors
from laneway.runtime.engine_profile import DecodeTimes, EngineFigures, EngineProfile, PrefillTimes, PrefixTimes
from laneway.workers.calibration.measuring import Measured

STEP_ERROR_QUANTILE = 0.9
BASE_S_MIN = 1e-6  # 0 would say that nothing is known


def profile_of(
    measured: Measured, *, name: str, engine: str, version: str, machine: str, model: str, date: str
) -> EngineProfile:
    """Times of tables are medians. A cell of the decode table that was not measured is what the fit says of it."""
    capacity = measured.capacity
    times = fit_steps(measured.steps, measured.chunk_tokens)
    times = replace(times, base_s=max(BASE_S_MIN, times.base_s))
    errors = sorted(map(abs, relative_errors([s for s in measured.steps if s.sequences], times)))
    return EngineProfile(
        name=name,
        what=f"Step times of {model} under {engine} {version}, on {machine}; milliseconds",
        source=f"measured by laneway calibrate engine, {date}",
        kv_capacity_tokens=capacity.kv_tokens,
        prefill=PrefillTimes(list(measured.prefill), [_ms(point.median_s) for point in measured.prefill.values()]),
        decode=_decode_table(measured, times),
        prefill_with_prefix=_prefix_table(measured),
        engine=EngineFigures(
            engine=engine,
            version=version,
            machine=machine,
            date=date,
            step_times=times,
            step_error=round(errors[int(STEP_ERROR_QUANTILE * (len(errors) - 1))], 4) if errors else 0.0,
            slots=capacity.slots,
            block_tokens=capacity.block_tokens,
            kv_tokens=capacity.kv_tokens,
            kv_filled_tokens=measured.kv_filled_tokens,
            paged=capacity.paged,
            chunk_tokens=measured.chunk_tokens,
            load_s=round(measured.load_s, 3),
            abort_queued_s=round(measured.aborts["queued"].median_s, 5),
            abort_prefilling_s=round(measured.aborts["prefilling"].median_s, 5),
            abort_decoding_s=round(measured.aborts["decoding"].median_s, 5),
            spread=round(measured.spread, 4),
        ),
    )


def _decode_table(measured: Measured, times: StepTimes) -> DecodeTimes:
    batches = sorted({batch for batch, _ in measured.decode})
    contexts = sorted({context for _, context in measured.decode})
    return DecodeTimes(
        batches, contexts, [[_cell_ms(measured, times, batch, context) for context in contexts] for batch in batches]
    )


def _cell_ms(measured: Measured, times: StepTimes, batch: int, context: int) -> float:
    """As measured, moved from the context that the batch happened to hold to that of the cell."""
    expected_s = times.decode_s(batch, batch * context)
    cell = measured.decode.get((batch, context))
    if cell is None:
        return _ms(expected_s)
    at_s = times.decode_s(batch, round(cell.context_tokens))
    return _ms(cell.point.median_s * expected_s / at_s if at_s else cell.point.median_s)


def _prefix_table(measured: Measured) -> PrefixTimes | None:
    if not measured.prefixed:
        return None
    prefixes = sorted({prefix for prefix, _ in measured.prefixed})
    tails = sorted({tail for _, tail in measured.prefixed})
    return PrefixTimes(
        prefixes, tails, [[_ms(measured.prefixed[prefix, tail].median_s) for tail in tails] for prefix in prefixes]
    )


def _ms(seconds: float) -> float:
    return max(1e-3, round(seconds * 1e3, 3))
