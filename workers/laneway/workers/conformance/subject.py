"""What the kit is told of the engine that it is to judge, and how that is made from a pool."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from laneway.core.catalogue import Capabilities, Pool
from laneway.runtime.engine_options import EngineOptions
from laneway.runtime.tokenizer import Tokenizer, load_tokenizer
from laneway.workers.engines.host import ProcessEngine
from laneway.workers.engines.protocol import Engine
from laneway.workers.engines.registry import make_engine

# A real model goes on with such characters; most vocabularies spell each with several tokens.
WIDE_PROMPT = " ".join(["漢字"] * 8)


@dataclass(frozen=True)
class Subject:
    """An engine to judge. What it holds it says itself when it starts (EngineCapacity)."""

    make: Callable[[], Engine]  # a new one each time, not started; the kit has one at once
    tokenizer: Tokenizer  # of its model
    can: Capabilities  # what it offers; `exact` as well: with it, texts are compared
    kill: Callable[[Engine], object] | None = None  # ends one without its consent; None: no way to
    wide_prompt: str = WIDE_PROMPT  # whose answer has characters of several bytes
    abort_calls: int = 3  # calls of the sink from an abort to the end it brings (abort_calls_of)
    silence_s: float = 60.0  # an engine with work that says nothing for so long has failed the case
    case_s: float = 300.0  # for one case, whatever is said


def subject_of(pool: Pool, options: EngineOptions) -> Subject:
    """The engine of a pool, as its worker would run it. Raises ConfigError."""
    own_process = isinstance(make_engine(pool, options), ProcessEngine)
    return Subject(
        make=lambda: make_engine(pool, options),
        tokenizer=load_tokenizer(pool.tokenizer),
        can=pool.capabilities,
        kill=kill_process if own_process else None,
        abort_calls=abort_calls_of(pool.capabilities),
    )


def abort_calls_of(can: Capabilities) -> int:
    """What was on its way, the steps that may still compute the sequence, and the one that says that it has ended. An
    engine whose steps nobody knows gets the step that the contract allows."""
    return 2 + max(1, can.abort_steps)


def kill_process(engine: Engine) -> None:
    """Ends the process of an engine at once, as the kernel does where memory runs out."""
    assert isinstance(engine, ProcessEngine)
    assert engine.process_id is not None
    os.kill(engine.process_id, signal.SIGKILL)
