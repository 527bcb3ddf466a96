"""What a log line holds, and what it never holds."""

import io
import json
import logging

import pytest
import structlog

from laneway.runtime.logging import VALUE_CHARACTERS_MAX, get_logger, set_up_logging


@pytest.fixture
def lines():
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def read(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_with_service_logger_time_and_keys(lines):
    set_up_logging("worker", form="json", stream=lines)
    structlog.contextvars.bind_contextvars(lane="batch")
    get_logger("laneway.pull").info("job_claimed", job_id="j", attempt=2)
    (line,) = read(lines)
    assert line.pop("timestamp")
    assert line == {
        "event": "job_claimed", "job_id": "j", "attempt": 2, "lane": "batch", "level": "info",
        "logger": "laneway.pull", "service": "worker",
    }  # fmt: skip


def test_other_libraries_lines_look_the_same(lines):
    set_up_logging("worker", form="json", stream=lines)
    logging.getLogger("grpc").warning("odd %s", "thing")
    (line,) = read(lines)
    assert (line["event"], line["logger"], line["service"]) == ("odd thing", "grpc", "worker")


def test_prompts_outputs_and_tokens_are_withheld_and_long_values_cut(lines):
    set_up_logging("worker", form="json", stream=lines)
    secret = "my s3cret"
    get_logger("a").error(
        "engine_failed", prompt=secret, text=secret, messages=[secret], authorization=secret, detail="x" * 9000
    )
    (line,) = read(lines)
    assert "s3cret" not in lines.getvalue()
    assert len(str(line["detail"])) < VALUE_CHARACTERS_MAX + 40


def test_an_error_has_its_traceback_on_its_one_line(lines):
    set_up_logging("worker", form="json", stream=lines)
    try:
        raise ValueError("broken")
    except ValueError as error:
        get_logger("a").error("call_failed", exc_info=error)
    (line,) = read(lines)
    assert "broken" in json.dumps(line["exception"])


@pytest.mark.parametrize("form", ["json", "console"])
def test_an_error_does_not_show_the_values_of_local_variables(lines, form):
    set_up_logging("worker", form=form, stream=lines)
    prompt = "my s3cret"
    try:
        raise ValueError(f"broken with {len(prompt)} characters")
    except ValueError as error:
        get_logger("a").error("call_failed", exc_info=error)
    assert "s3cret" not in lines.getvalue()
    assert "broken with 9" in lines.getvalue()


def test_levels_below_the_one_set_are_silent(lines):
    set_up_logging("worker", level="warning", form="json", stream=lines)
    get_logger("a").info("nothing")
    get_logger("a").warning("something")
    assert [line["event"] for line in read(lines)] == ["something"]


def test_a_terminal_gets_readable_lines(lines):
    set_up_logging("worker", form="console", stream=lines)
    get_logger("a").info("job_claimed", job_id="j")
    assert "job_claimed" in lines.getvalue()
    with pytest.raises(json.JSONDecodeError):
        read(lines)
