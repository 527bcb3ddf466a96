"""Writes plain values as TOML. The standard library reads TOML and does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def toml_text(table: Mapping[str, object]) -> str:
    """TOML of nested tables of text, numbers, booleans and lists. None values are left out: TOML has no null."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in table.items() if value is not None)


def merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`base` with `over` on top: tables are merged key by key, everything else is replaced. Neither is changed."""
    result = dict(base)
    for key, value in over.items():
        found = result.get(key)
        result[key] = merged(found, value) if isinstance(found, Mapping) and isinstance(value, Mapping) else value
    return result


def _value(value: object) -> str:
    # bool before int: a bool is an int. JSON's text escapes are a subset of TOML's.
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _float(value)
        case str() | Path():
            return _text(str(value))
        case Mapping():
            inner = ", ".join(f"{_key(str(k))} = {_value(v)}" for k, v in value.items() if v is not None)
            return f"{{ {inner} }}" if inner else "{}"
        case Sequence():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case _:
            raise TypeError(f"TOML has no {type(value).__name__}")


def _float(value: float) -> str:
    return repr(value)  # Python's forms (1.0, 1e-09, 1e+16, inf, nan) are TOML's


def _key(key: str) -> str:
    return _text(key)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
