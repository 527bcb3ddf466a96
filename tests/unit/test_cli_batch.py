"""Lines of a batch file as requests, and the journal by which an interrupted batch goes on."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from laneway.cli.batch_journal import SUFFIX, Journal, survey, written_lines
from laneway.cli.batch_lines import _TYPES, Defaults, Line, parse_line
from laneway.client import RequestFields
from laneway.client.request import build_spec
from laneway.core.errors import ConfigError, InvalidRequest
from laneway.core.lanes import Lane

BEGAN = datetime(2026, 3, 1, 12, tzinfo=UTC)
DEFAULTS = Defaults(BEGAN, {"model": "chat", "lane": Lane.BATCH, "max_tokens": 7, "deadline_s": 600.0})


def parsed(line: object) -> Line:
    return parse_line(json.dumps(line).encode(), DEFAULTS)


def test_a_line_holds_what_submit_takes_and_options_fill_the_rest():
    line = parsed({"id": "a", "prompt": "Hi", "max_tokens": 3, "temperature": 0, "idempotency_key": "k"})
    assert (line.id, line.key) == ("a", "k")
    spec = build_spec(line.request, BEGAN.timestamp())
    assert (spec.model, spec.generate.text, spec.generate.sampling.max_tokens) == ("chat", "Hi", 3)
    assert spec.contract.deadline.ToDatetime(UTC) == BEGAN + timedelta(seconds=600)
    assert parsed({"prompt": "Hi"}).request.get("max_tokens") == 7


def test_a_line_means_the_same_whenever_it_is_sent():
    line = parsed({"prompt": "Hi", "deadline_s": 60, "not_before_s": 5})
    specs = [build_spec(line.request, BEGAN.timestamp() + after) for after in (0.0, 1000.0)]
    assert specs[0] == specs[1]
    at = parsed({"prompt": "Hi", "deadline_at": "2026-03-02T00:00:00Z"})
    assert at.request.get("deadline_at") == datetime(2026, 3, 2, tzinfo=UTC)


def test_an_openai_line_is_the_same_request():
    line = parsed(
        {
            "custom_id": "request-1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": "chat",
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                ],
                "max_completion_tokens": 5,
                "stop": "\n",
                "seed": 4,
                "response_format": {"type": "json_object"},
                "metadata": {"a": "b"},
                "stream": False,
            },
        }
    )
    assert line.id == "request-1"
    spec = build_spec(line.request, BEGAN.timestamp())
    assert [part.text for message in spec.generate.chat.messages for part in message.parts] == ["Be brief.", "Hi"]
    assert (spec.generate.sampling.max_tokens, list(spec.generate.sampling.stop)) == (5, ["\n"])
    assert spec.generate.response_format.json_object
    assert dict(spec.contract.labels) == {"a": "b"}


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"prompt": "Hi", "modell": "x"}, "modell"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "Hi", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "Hi", "lane": "fast"}, "lane"),
        ({"messages": "Hi"}, "messages"),
        ({"prompt": "Hi", "deadline_s": 5, "deadline_at": "2026-03-02T00:00:00Z"}, "deadline_at"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {}}, "url"),
        ({"custom_id": "a", "body": {"prompt": "Hi", "stream": True}}, "body.stream"),
        ({"custom_id": "a", "body": {"user": "me"}}, "body.user"),
        ({"custom_id": "a", "body": 7}, "body"),
        ({"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}}, "body.messages"),
        ({"body": {"response_format": {"type": "xml"}}}, "body.response_format"),
        ({"custom_id": "a", "body": {}, "extra": 1}, "extra"),
    ],
)
def test_a_bad_line_names_its_field(line: object, field: str):
    with pytest.raises(InvalidRequest) as caught:
        parsed(line)
    assert caught.value.field == field


@pytest.mark.parametrize("data", [b"{", b"[1]", b"7", b"\xff", b'{"prompt": "\xff"}'])
def test_what_is_no_json_object_is_said_to_be_none(data: bytes):
    with pytest.raises(InvalidRequest) as caught:
        parse_line(data, DEFAULTS)
    assert caught.value.reason == "MALFORMED_REQUEST"


def test_every_argument_of_submit_can_be_in_a_line():
    assert _TYPES.keys() >= RequestFields.__annotations__.keys()


# --- the journal -----------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"model": "chat", "temperature": 0.0, "labels": {"a": "b"}}


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "b"}')
    return path


def test_a_journal_goes_on_where_it_was_even_if_cut_off(batch: Path):
    sha256, count = survey(batch)
    assert count == 2
    with Journal.open(batch, sha256, OPTIONS) as first:
        assert not first.resumed
        first.accepted(1, "job 1")
        first.accepted(3, "job 3")
    path = batch.with_name(batch.name + SUFFIX)
    path.write_bytes(path.read_bytes()[:-4])
    with Journal.open(batch, sha256, OPTIONS) as second:
        assert second.resumed
        assert second.header == first.header
        assert second.jobs == {1: "job 1"}
        second.accepted(3, "job 3")
    with Journal.open(batch, sha256, OPTIONS) as third:
        assert third.jobs == {1: "job 1", 3: "job 3"}
        third.remove()
    assert not path.exists()


def test_a_journal_of_something_else_is_refused(batch: Path):
    sha256, _ = survey(batch)
    with Journal.open(batch, sha256, OPTIONS):
        pass
    with pytest.raises(ConfigError, match="other options"):
        Journal.open(batch, sha256, {**OPTIONS, "model": "other"})
    batch.write_bytes(b'{"prompt": "c"}\n')
    with pytest.raises(ConfigError, match="is not what it was"):
        Journal.open(batch, survey(batch)[0], OPTIONS)
    batch.with_name(batch.name + SUFFIX).write_bytes(b"something\n")
    with pytest.raises(ConfigError, match="not the journal"):
        Journal.open(batch, sha256, OPTIONS)


def test_results_that_are_there_are_known_and_a_torn_one_is_not(tmp_path: Path):
    output = tmp_path / "results.jsonl"
    assert written_lines(output) == set()
    output.write_bytes(b'{"line": 1, "text": "x"}\n{"line": 4}\n{"line": 5, "te')
    assert written_lines(output) == {1, 4}
    assert output.read_bytes().endswith(b'{"line": 4}\n')
    output.write_bytes(b"a letter\n")
    with pytest.raises(ConfigError, match="something else"):
        written_lines(output)


def test_a_line_may_name_its_session_and_route():
    spec = build_spec(parsed({"prompt": "Hi", "session_id": "s", "route": "faq"}).request, BEGAN.timestamp())
    assert (spec.generate.session_id, spec.route) == ("s", "faq")
