"""structlog for every process: JSON lines for services, readable lines in a terminal, standard logging included.

Events are short constant phrases in the past tense, everything else is a key. Prompts and outputs are never logged:
keys that would hold them are withheld here, whatever a call site does, and no value is longer than a line may be.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal, TextIO

import structlog
import structlog.tracebacks

VALUE_CHARACTERS_MAX = 2048
WITHHELD_KEYS = frozenset(
    {"prompt", "prompts", "prompt_ids", "text", "content", "messages", "output", "completion", "token", "authorization"}
)
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

EventDict = MutableMapping[str, Any]  # structlog's own type: values are whatever was logged


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A logger whose lines say `logger: name`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


def set_up_logging(
    service: str,
    *,
    level: Literal["debug", "info", "warning", "error"] = "info",
    form: Literal["auto", "json", "console"] = "auto",
    stream: TextIO | None = None,
) -> None:
    """Sets the process's logging up, once, before anything logs. Standard loggers go the same way."""
    out = stream or sys.stderr
    as_json = form == "json" or (form == "auto" and not out.isatty())
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _bind_service(service),
        withhold,
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    # Neither form shows the values of local variables in a traceback: a prompt could be among them.
    tracebacks = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=20)
    last: list[structlog.types.Processor] = (
        [structlog.processors.ExceptionRenderer(tracebacks), structlog.processors.JSONRenderer()]
        if as_json
        else [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    logging.getLogger("nats").setLevel(max(_LEVELS[level], logging.WARNING))  # it logs each reconnect attempt
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def withhold(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Replaces what must not be logged, and cuts what is too long."""
    for key, value in event.items():
        if key in WITHHELD_KEYS:
            event[key] = "[withheld]"
        elif isinstance(value, str) and len(value) > VALUE_CHARACTERS_MAX:
            event[key] = f"{value[:VALUE_CHARACTERS_MAX]}… ({len(value)} characters)"
    return event


def _bind_service(service: str) -> structlog.types.Processor:
    def bind(_logger: object, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", service)
        return event

    return bind
