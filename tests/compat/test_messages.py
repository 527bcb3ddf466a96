"""What earlier releases wrote is read by this one, and what this one writes is what was recorded of it.

After a change of what is written, run tools/record_messages.py and look at the difference: before the release it is
the format that changes; after it the folder is of a release that runs somewhere, and must stay as it is.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laneway.core.job import SCHEMA
from laneway.runtime.wire import records
from laneway.runtime.wire.reading import UnreadableMessage
from tools.record_messages import FOLDER, KINDS, SCHEMAS, Kind, recording, release, schemas_read

ONE_OF_THESE = {"json_object", "json_schema", "regex", "grammar", "result_object"}
NOT_STORED = frozenset({"left_out"})  # what a reader says of what it read

KIND_OF = {kind.name: kind for kind in KINDS}
RELEASES = sorted((folder.name for folder in FOLDER.iterdir()), key=lambda name: [int(n) for n in name.split(".")])
RECORDED = [
    (name, path) for name in RELEASES for path in sorted((FOLDER / name).glob("*.json")) if path.name != SCHEMAS
]
each_recorded = pytest.mark.parametrize(("kind", "path"), [(KIND_OF[p.stem], p) for _, p in RECORDED], ids=lambda v: (
    "" if isinstance(v, Kind) else f"{v.parent.name}-{v.stem}"
))  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
each_protobuf_kind = pytest.mark.parametrize("kind", [k for k in KINDS if k.message], ids=lambda kind: kind.name)


def read(path: Path) -> tuple[bytes, Any]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return base64.b64decode(content["bytes"]), content["readable"]


@each_recorded
def test_a_recorded_message_says_what_it_said(kind: Kind, path: Path):
    """A field that got another number, name or type shows here."""
    data, readable = read(path)
    assert kind.readable(data) == readable


@each_recorded
def test_a_service_of_today_reads_every_field_of_a_recorded_message(kind: Kind, path: Path):
    data, readable = read(path)
    again = kind.readable(kind.again(data))
    assert _without_schema(again) == _without_schema(readable)


@each_kind
def test_what_is_written_today_is_what_was_recorded(kind: Kind):
    path = FOLDER / release() / f"{kind.name}.json"
    assert path.exists(), "run tools/record_messages.py"
    data, readable = read(path)
    assert kind.readable(kind.encode()) == readable, "run tools/record_messages.py, and look at what changed"
    assert kind.decode(data) == kind.sample
    if kind.message is None:
        assert data == kind.encode()
    assert json.loads(recording(kind))["form"] == json.loads(path.read_text())["form"]


@each_kind
def test_a_sample_has_every_field_set(kind: Kind):
    """So that a new field is recorded as well."""
    assert list(_unset(kind.sample, kind.name)) == []


def test_every_kind_of_the_newest_release_is_recorded_and_no_other():
    assert RELEASES[-1] == release(), "run tools/record_messages.py"
    assert {path.stem for name, path in RECORDED if name == release()} == set(KIND_OF)


# --- schema numbers ---------------------------------------------------------------------------------


def schemas(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / name / SCHEMAS).read_text())
    return found


def test_the_schema_written_today_is_read_by_the_release_before():
    """During an upgrade both run: a schema is read for one release before it is written."""
    assert schemas(release()) == {"written": SCHEMA, "read": schemas_read()}
    for name in RELEASES[-2:]:
        assert SCHEMA in schemas(name)["read"], f"release {name} could not read what this one writes"
        assert schemas(name)["written"] in schemas_read(), f"what release {name} left stored could not be read"


@pytest.mark.parametrize("name", ["job_record", "lane_message", "dead_letter", "worker_lease"])
def test_a_message_is_read_for_one_schema_after_its_own(name: str, monkeypatch: pytest.MonkeyPatch):
    kind = KIND_OF[name]
    data = kind.encode()
    monkeypatch.setattr(records, "SCHEMA", SCHEMA + 1)
    assert kind.decode(data) == kind.sample
    assert kind.decode(kind.encode()) == kind.sample, "and the next one too"
    monkeypatch.setattr(records, "SCHEMA", SCHEMA + 2)
    with pytest.raises(UnreadableMessage, match=f"schema {SCHEMA}"):
        kind.decode(data)


@each_protobuf_kind
def test_a_field_that_a_later_release_adds_is_passed_over(kind: Kind):
    added = b"\xfa\x7f\x05later"  # field 2047
    assert kind.readable(kind.again(kind.encode() + added)) == kind.readable(kind.encode())


# --- helpers ----------------------------------------------------------------------------------------


def _without_schema(readable: Any) -> Any:
    """A message read and written anew carries today's number."""
    match readable:
        case dict():
            return {key: _without_schema(value) for key, value in readable.items() if key != "schema"}
        case list():
            return [_without_schema(value) for value in readable]
        case _:
            return readable


def _unset(value: object, path: str) -> Iterator[str]:
    """Fields of a sample that have the value that they have where nobody sets them."""
    if isinstance(value, tuple | list):
        if value:
            yield from _unset(value[0], f"{path}[0]")
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            found = getattr(value, field.name)
            if field.name in NOT_STORED:
                continue
            if field.name in ONE_OF_THESE:
                continue  # a task has one format, and what refers to an object is recorded as a kind of its own
            has_default = field.default is not msgspec.NODEFAULT
            if found == field.default if has_default else not found:
                yield f"{path}.{field.name}"
            else:
                yield from _unset(found, f"{path}.{field.name}")
