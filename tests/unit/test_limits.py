"""`docs/limits.md`: every limit of the code has a row with its value and a test, or a reason why it is none."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path

import msgspec
import pytest

from laneway.runtime.settings import ModelSettings, Settings
from tests.unit.test_docs import setting
from tests.unit.test_faults import trouble_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
SIZES = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# How the names of limits look. Settings are found in the settings themselves.
LIMIT = re.compile(r"(^|_)MAX(_|$)|_max$|(^|_)(ATTEMPTS|TRIES|WINDOW|AT_ONCE)(_|$)|^_?[A-Z_]*LENGTH$")
LIMIT_SETTING = re.compile(r"_max$|_bytes$|queue_length|context_length|_inflight$|drain_s$")
SETTINGS_MODULE = "laneway.runtime.settings"
SHOWS = ("laneway.cli.demo", "laneway.cli.drill")  # scripts with a length of their own


@dataclass(frozen=True)
class Row:
    name: str
    default: float
    beyond: str
    test: str


def rows() -> list[Row]:
    found = []
    for line in PAGE.splitlines():
        if not line.startswith("| `"):
            continue
        name, default, beyond, test = (cell.strip() for cell in line.strip("|").split(" | "))
        number, _, unit = default.partition(" ")
        value = float(number.replace(",", "")) * SIZES.get(unit, 1)
        found.append(Row(name.strip("` "), value, beyond, test.strip("` ")))
    return found


ROWS = rows()
EXCUSED = re.findall(r"`([\w.]+)`", PAGE.partition("\n## Not limits\n")[2])
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


def value_of(name: str) -> object:
    """The present value of a limit; AttributeError or ImportError if there is none of the name."""
    if not name.startswith("laneway."):
        section, _, key = name.partition(".")
        return setting(section, key)
    owner, _, key = name.rpartition(".")
    if owner.rpartition(".")[2][0].isupper():
        module, _, kind = owner.rpartition(".")
        return default_of(getattr(importlib.import_module(module), kind), key)
    return getattr(importlib.import_module(owner), key)


def default_of(kind: type, key: str) -> object:
    if is_dataclass(kind):
        field = next((each for each in fields(kind) if each.name == key), None)
        if field is None:
            raise AttributeError(key)
        return None if field.default is MISSING else field.default
    if issubclass(kind, msgspec.Struct):
        return {each.name: each.default for each in msgspec.structs.fields(kind)}[key]
    if key in kind.__annotations__:  # of a TypedDict or a Protocol
        return None
    return getattr(kind, key)


@each_row
def test_a_limit_has_the_value_of_the_page(row: Row):
    assert value_of(row.name) == row.default


@each_row
def test_a_row_says_what_happens_and_names_a_test_that_exists(row: Row):
    assert len(row.beyond) > 2
    assert trouble_of(row.test) == ""


def test_no_limit_has_two_rows_or_is_excused_as_well():
    names = [row.name for row in ROWS] + EXCUSED
    assert sorted(set(names)) == sorted(names)


def test_what_is_excused_exists():
    for name in EXCUSED:
        value_of(name)


def constants(path: Path, module: str) -> Iterator[str]:
    """Names in a module and its classes that look like limits."""

    def within(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from within(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
            yield from (prefix + t.id for t in targets if isinstance(t, ast.Name) and LIMIT.search(t.id))

    yield from within(ast.parse(path.read_text(encoding="utf-8")).body, f"{module}.")


def limits_of_the_code() -> set[str]:
    found: set[str] = set()
    for root in ("services", "scheduler", "workers"):
        for path in sorted((ROOT / root / "laneway").rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / root).with_suffix("").parts)
            if module != SETTINGS_MODULE and not module.startswith(SHOWS):
                found.update(constants(path, module))
    return found


def limits_of_the_settings() -> set[str]:
    sections: dict[str, msgspec.Struct] = {
        name: getattr(Settings(), name) for name in Settings.__struct_fields__ if name != "models"
    }
    sections["models"] = ModelSettings(name="chat")
    found = set()
    for section, values in sections.items():
        for key in filter(LIMIT_SETTING.search, values.__struct_fields__):
            value = getattr(values, key)
            nested = value.__struct_fields__ if isinstance(value, msgspec.Struct) else ()
            found.update({f"{section}.{key}.{name}" for name in nested} or {f"{section}.{key}"})
    return found


def test_every_limit_is_on_the_page_or_said_to_be_none():
    known = {row.name for row in ROWS} | set(EXCUSED)
    assert (limits_of_the_code() | limits_of_the_settings()) - known == set()


def test_a_limit_of_any_shape_is_found(tmp_path: Path):
    module = tmp_path / "new.py"
    module.write_text(
        "A_MAX = 1\nB: int = 2\nC_BYTES_MAX: int = 2\nWINDOW = 3\nclass P:\n    jobs_max: int = 4\n    b: int = 5\n"
    )
    assert list(constants(module, "m")) == ["m.A_MAX", "m.C_BYTES_MAX", "m.WINDOW", "m.P.jobs_max"]
