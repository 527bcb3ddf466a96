"""`laneway calibrate`: measures what runs on this machine, and writes down what policy and simulations go by."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laneway.cli.connect import JsonOption
from laneway.cli.console import EXIT_FAILED, EXIT_USAGE, fail, print_json, run, say, seconds
from laneway.cli.serve import ConfigOption, SetOption, settings_of
from laneway.core.errors import ConfigError

if TYPE_CHECKING:
    from laneway.core.catalogue import Pool
    from laneway.runtime.engine_profile import EngineProfile
    from laneway.runtime.settings import Settings

app = typer.Typer(help="Measure what runs here.", no_args_is_help=True)

# Of repeated measurements; beyond it a profile says more of the machine's day than of the engine.
NOISY_SPREAD = 0.15
BUSY_LOAD = 0.5  # of the cores, from other work: figures will be worse than they need be
PACKAGES = {"openvino": "openvino-genai", "simulated": "laneway"}  # whose version an engine has


@app.callback()
def calibrate() -> None:
    pass


@app.command("engine")
def engine(
    pool: Annotated[str, typer.Option("--pool", help="Whose engine; the first of the settings if not given.")] = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", dir_okay=False, help="File to write; POOL.profile.json here if not given."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, less often: half a minute.")] = False,
    noisy: Annotated[bool, typer.Option("--noisy", help="Write what a noisy machine gave, too.")] = False,
    config: ConfigOption = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a pool's engine by itself: prefill, decoding, KV, aborts, load time; write its profile.

    Needs no NATS and no service. Stop what else runs on the machine: `laneway up` too.

    The profile is for `profile` of a models entry, and for `engine_options.profile` of a simulated engine.
    """
    settings = settings_of(config, set_)
    chosen = chosen_pool(settings, pool)
    path = out or (None if as_json else Path(f"{chosen.name}.profile.json"))
    if path is not None and not os.access(path.parent, os.W_OK):
        fail(f"{path.parent} is no folder that can be written to", EXIT_USAGE)

    async def work() -> int:
        profile = await _measured(settings, chosen, quick=quick)
        figures = profile.engine
        assert figures is not None
        if as_json:
            print_json(profile)
        else:
            _show(profile)
        return keep(path, profile, noisy=noisy)

    run(work)


def keep(path: Path | None, profile: EngineProfile, *, noisy: bool) -> int:
    """Writes what was measured, unless the machine was too noisy for it to mean anything; the exit code."""
    import msgspec

    spread = profile.engine.spread if profile.engine is not None else 0.0
    if spread > NOISY_SPREAD and not noisy:
        say(
            f"laneway: measurements of one thing differ by {spread:.0%} (at most {NOISY_SPREAD:.0%}): nothing was "
            "written. Stop what else runs here and try again, or take it with --noisy"
        )
        return EXIT_FAILED
    if path is None:
        return 0
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    except OSError as error:
        fail(f"{path} could not be written: {error.strerror}")
    say(f'written to {path}; use it with: profile = "{path}" in [[models]] of the pool {profile.name}')
    return 0


def chosen_pool(settings: Settings, name: str) -> Pool:
    """The pool of that name, the first without one; ends the command where there is none."""
    from laneway.runtime.catalogue import catalogue_of

    try:
        catalogue = catalogue_of(settings)
    except ConfigError as error:
        fail(str(error), EXIT_USAGE)
    pool = catalogue.pool(name) if name else catalogue.pools[0]
    if pool is None:
        fail(f"there is no pool {name}; known: {', '.join(p.name for p in catalogue.pools)}", EXIT_USAGE)
    return pool


async def _measured(settings: Settings, pool: Pool, *, quick: bool) -> EngineProfile:
    from laneway.runtime.clock import SYSTEM_RANDOM, SystemClock
    from laneway.runtime.logging import set_up_logging
    from laneway.workers.calibration.measuring import Calibration
    from laneway.workers.calibration.probe import CalibrationFailed, Probe
    from laneway.workers.calibration.writing import profile_of
    from laneway.workers.engines.protocol import EngineStartError
    from laneway.workers.engines.registry import make_engine

    set_up_logging("calibrate", level="warning", form=settings.process.log_format)
    options = settings.engine_options_of(pool.name)
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if load > BUSY_LOAD * cores:
        say(f"this machine is busy (load {load:.1f} on {cores} cores): what is measured will be noisy")
    say(f"starting the {pool.engine} engine of pool {pool.name}")
    clock = SystemClock()
    started = make_engine(pool, options)
    try:
        measured = await Calibration(started, Probe(clock, SYSTEM_RANDOM), clock, say, quick=quick).run()
    except (EngineStartError, CalibrationFailed) as error:
        fail(str(error), EXIT_FAILED)
    finally:
        await started.close()
    model = options.model_file or pool.tokenizer
    return profile_of(
        measured,
        name=pool.name,
        engine=pool.engine,
        version=_version(pool.engine),
        machine=f"the profile {options.profile}" if pool.engine == "simulated" and options.profile else _machine(),
        model=Path(model).name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )


def _show(profile: EngineProfile) -> None:
    for name, text in (*_table_rows(profile), *_figure_rows(profile)):
        print(f"{name:14}{text}")


def _table_rows(profile: EngineProfile) -> Iterator[tuple[str, str]]:
    def cells(tokens: list[int], row: list[float]) -> str:
        return ", ".join(f"{n} {_ms(ms)}" for n, ms in zip(tokens, row, strict=True))

    yield "prefill", f"{cells(profile.prefill.new_tokens, profile.prefill.ms)} (tokens, ms)"
    prefix = profile.prefill_with_prefix
    if prefix is not None:
        for tokens, row in zip(prefix.prefix_tokens, prefix.ms, strict=True):
            yield f"  after {tokens}", f"{cells(prefix.new_tokens, row)} (new tokens, ms)"
    decode = profile.decode
    yield "decode", "".join([f"{'batch':>8}", *(f"{context:>8}" for context in decode.context)]) + "  tokens of context"
    for batch, row in zip(decode.batch, decode.ms, strict=True):
        yield "", "".join([f"{batch:>8}", *(f"{_ms(ms):>8}" for ms in row)]) + "  ms"


def _figure_rows(profile: EngineProfile) -> Iterator[tuple[str, str]]:
    figures = profile.engine
    assert figures is not None
    fit = figures.step_times
    terms = (
        f"{fit.base_s * 1e3:.3g} ms",
        f"{fit.sequence_s * 1e6:.3g} us a sequence",
        f"{fit.context_token_s * 1e9:.3g} ns a token of context",
        f"{fit.prefill_token_s * 1e6:.3g} us a prompt token, at most {figures.chunk_tokens}",
    )
    yield "step", " + ".join(terms)
    yield "", f"nine of ten steps that decode are within {figures.step_error:.1%} of that"
    how = "handed out as answers grow" if figures.paged else "reserved when a sequence joins"
    filled = f"; {figures.kv_filled_tokens} tokens were held at once" if figures.kv_filled_tokens else ""
    yield "KV", f"{figures.kv_tokens // figures.block_tokens} blocks of {figures.block_tokens}, {how}{filled}"
    aborts = (
        f"{seconds(figures.abort_queued_s)} queued",
        f"{seconds(figures.abort_prefilling_s)} prefilling",
        f"{seconds(figures.abort_decoding_s)} decoding",
    )
    yield "abort", ", ".join(aborts)
    yield "load", seconds(figures.load_s)
    yield "spread", f"{figures.spread:.0%} of repeated measurements"
    yield "engine", f"{figures.engine} {figures.version}, {figures.machine}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _version(engine: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(PACKAGES.get(engine, engine))
    except PackageNotFoundError:
        return ""


def _machine() -> str:
    """In words: processor, cores, memory."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (OSError, ValueError):
        return name
    return f"{name}, {os.cpu_count()} cores, {memory:.0f} GiB"
