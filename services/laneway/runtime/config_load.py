"""Turns flags, environment, file and defaults into one frozen settings struct, each value with its origin.

Knows nothing of Laneway's sections: it walks whatever msgspec struct it is given. Everything that does not fit stops
with a ConfigError that names the key, the value, where it came from and what is allowed. Nothing is ignored.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import msgspec.inspect
import msgspec.structs

from laneway.core.errors import ConfigError

ENV_PREFIX = "LANEWAY_"
DEFAULT_FILE = "laneway.toml"
# Names with the prefix that are not settings: read by the launcher, the container image, the commands that call
# services, and this module.
RESERVED_ENV = frozenset(
    {
        "LANEWAY_CONFIG",
        "LANEWAY_DATA_DIR",
        "LANEWAY_DOCKER_SETUP",
        "LANEWAY_ADDRESS",
        "LANEWAY_SCHEDULER_ADDRESS",
        "LANEWAY_ROUTING_ADDRESS",
        "LANEWAY_TOKEN_FILE",
        "LANEWAY_ENDPOINT_FILE",
    }
)

_LOGIN = re.compile(r"://[^/@\s]*@")  # in an address: what is wrong with the settings is logged and published
_UNKNOWN_FIELD = "Object contains unknown field `"

S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Value:
    """One given value, not converted yet. Text from flags and environment may have to be parsed."""

    raw: object
    origin: str
    is_text: bool


@dataclass(frozen=True, slots=True)
class Loaded(Generic[S]):
    settings: S
    # Dotted key of every leaf -> "default", "file …", "env …" or "flag …". Tables of a list have those leaves that were
    # given, such as models[0].slots; their others are defaults.
    origins: Mapping[str, str]


def load(
    struct: type[S],
    *,
    config: str | Path | None = None,
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str],
    directory: Path | None = None,
) -> Loaded[S]:
    """Resolves `struct`: flags (dotted key -> value) > LANEWAY_SECTION__KEY > TOML file > defaults.

    find_file says which file.
    """
    given: dict[str, Value] = {}
    given.update(_file_values(struct, find_file(config, environ, directory)))
    given.update(_env_values(struct, environ))
    for key, raw in (flags or {}).items():
        origin = f"flag for {key}"
        _check_known(struct, key, origin)
        given[key] = Value(raw, origin, isinstance(raw, str))
    origins: dict[str, str] = {}
    return Loaded(_build(struct, None, "", given, origins), origins)


def leaves(settings: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every (dotted key, value) of a resolved settings struct."""
    for name in settings.__struct_fields__:
        value: object = getattr(settings, name)
        if isinstance(value, msgspec.Struct):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_file(config: str | Path | None, environ: Mapping[str, str], directory: Path | None = None) -> Path | None:
    """`config`, else LANEWAY_CONFIG, else laneway.toml in `directory` (the working directory) if there is one."""
    named = config or environ.get("LANEWAY_CONFIG")
    if named:
        path = Path(named)
        if not path.is_file():
            raise ConfigError(f"the configuration file {path} does not exist")
        return path
    path = (directory or Path.cwd()) / DEFAULT_FILE
    return path if path.is_file() else None


# --- sources ---------------------------------------------------------------------------------------


def _file_values(struct: type[msgspec.Struct], path: Path | None) -> dict[str, Value]:
    if path is None:
        return {}
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not all that is wrong with TOML is told as a TOMLDecodeError
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return dict(_flatten(struct, tree, "", f"file {path}"))


def _flatten(
    struct: type[msgspec.Struct], tree: Mapping[str, object], prefix: str, origin: str
) -> Iterator[tuple[str, Value]]:
    fields = _fields(struct)
    for name, raw in tree.items():
        key = f"{prefix}{name}"
        if name not in fields:
            raise _unknown(key, prefix, fields, origin)
        nested = _nested(fields[name])
        if nested is None:
            yield key, Value(raw, origin, is_text=False)
        elif isinstance(raw, dict):
            yield from _flatten(nested, raw, f"{key}.", origin)
        else:
            raise ConfigError(f"{key} must be a table, not {_shown(raw)} ({origin})")


def _env_values(struct: type[msgspec.Struct], environ: Mapping[str, str]) -> dict[str, Value]:
    out: dict[str, Value] = {}
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV:
            continue
        key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
        _check_known(struct, key, f"env {name}")
        out[key] = Value(environ[name], f"env {name}", is_text=True)
    return out


def _check_known(struct: type[msgspec.Struct], key: str, origin: str) -> None:
    prefix, names = "", key.split(".")
    for position, name in enumerate(names):
        fields = _fields(struct)
        if name not in fields:
            raise _unknown(key, prefix, fields, origin)
        nested = _nested(fields[name])
        last = position == len(names) - 1
        if last and nested is not None:
            raise ConfigError(f"{key} is a section, not a setting; its keys: {', '.join(_fields(nested))} ({origin})")
        if not last and nested is None:
            raise ConfigError(f"there is no setting {key}: {prefix}{name} has no parts ({origin})")
        if nested is not None:
            struct, prefix = nested, f"{prefix}{name}."


# --- building --------------------------------------------------------------------------------------


def _build(
    struct: type[S], default: msgspec.Struct | None, prefix: str, given: Mapping[str, Value], origins: dict[str, str]
) -> S:
    """The struct from what was given; the rest comes from `default`, the struct's value in its parent's defaults."""
    values: dict[str, object] = {}
    defaults = default or _own_defaults(struct)
    for name, annotation in _fields(struct).items():
        key = f"{prefix}{name}"
        nested = _nested(annotation)
        if nested is not None:
            values[name] = _build(nested, _struct_or_none(getattr(defaults, name, None)), f"{key}.", given, origins)
        elif key in given:
            values[name] = _convert(key, given[key], annotation)
            origins[key] = given[key].origin
            origins.update(_item_origins(key, given[key], annotation))
        else:
            origins[key] = "default"
            if default is not None:
                values[name] = getattr(default, name)
    try:
        return struct(**values)
    except (TypeError, ValueError) as error:  # a missing key, or a check across keys in __post_init__
        sources = sorted({origins[f"{prefix}{n}"] for n in _fields(struct) if f"{prefix}{n}" in origins} - {"default"})
        raise ConfigError(f"{prefix.rstrip('.') or 'settings'}: {error} ({', '.join(sources) or 'default'})") from None


def _convert(key: str, value: Value, annotation: object) -> object:
    raw = value.raw
    if value.is_text and isinstance(raw, str):
        raw = _parse_text(key, raw, annotation, value.origin)
    try:
        return msgspec.convert(raw, type=annotation, strict=not value.is_text)
    except msgspec.ValidationError as error:
        raise ConfigError(_validation_message(key, value, annotation, error)) from None


def _parse_text(key: str, text: str, annotation: object, origin: str) -> object:
    """Text of the environment or a flag: lists as JSON or comma-separated, everything else by msgspec's lax mode."""
    kind = msgspec.inspect.type_info(annotation)
    if not isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        return text
    if text.lstrip().startswith("["):
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{key} is not a valid JSON list: {error} ({origin})") from None
    return [part.strip() for part in text.split(",") if part.strip()]


def _item_origins(key: str, value: Value, annotation: object) -> Iterator[tuple[str, str]]:
    """The leaves that the tables of a list give; what they leave out is a default of the item."""
    raw = value.raw
    if value.is_text and isinstance(raw, str):
        raw = _parse_text(key, raw, annotation, value.origin)
    if _item_struct(annotation) is None or not isinstance(raw, list):
        return
    for number, item in enumerate(raw):
        for name in _leaf_names(item):
            yield f"{key}[{number}].{name}", value.origin


def _leaf_names(table: Mapping[str, object]) -> Iterator[str]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from (f"{name}.{inner}" for inner in _leaf_names(value))
        else:
            yield name


def _validation_message(key: str, value: Value, annotation: object, error: msgspec.ValidationError) -> str:
    what, _, path = str(error).partition(" - at `$")
    inner = path.removesuffix("`")  # such as [0].slots, inside a list of tables
    if what.startswith(_UNKNOWN_FIELD):
        name = what.removeprefix(_UNKNOWN_FIELD).removesuffix("`")
        item = _item_struct(annotation)
        return str(_unknown(f"{key}{inner}.{name}", f"{key}{inner}.", _fields(item) if item else {}, value.origin))
    shown = "" if inner else f" = {_shown(value.raw)}"
    allowed = _allowed(annotation, inner)
    return f"{key}{inner}{shown}: {allowed or what[:1].lower() + what[1:]} ({value.origin})"


def _allowed(annotation: object, inner: str) -> str:
    """What a field takes, in words, where msgspec's own message would show a pattern or nothing."""
    item = _item_struct(annotation)
    if inner and item is not None:
        annotation = _fields(item).get(inner.rpartition(".")[2])
    elif inner:
        annotation = getattr(annotation, "__args__", (None,))[0]
    kind = msgspec.inspect.type_info(annotation)
    if isinstance(kind, msgspec.inspect.LiteralType):
        return f"must be one of {', '.join(str(v) for v in kind.values)}"
    if isinstance(kind, msgspec.inspect.Metadata) and kind.extra is not None:
        return f"must be {kind.extra['words']}"
    return ""


def _unknown(key: str, prefix: str, fields: Mapping[str, object], origin: str) -> ConfigError:
    near = difflib.get_close_matches(key.rsplit(".", 1)[-1] if prefix else key.split(".", 1)[0], fields, 1, 0.5)
    if near:
        hint = f"; did you mean {prefix}{near[0]}?"
    else:
        hint = f"; known: {', '.join(f'{prefix}{name}' for name in fields)}"
    return ConfigError(f"there is no setting {key} ({origin}){hint}")


def _shown(raw: object) -> str:
    text = _LOGIN.sub("://...@", repr(raw))
    return text if len(text) <= 80 else f"{text[:77]}..."


# --- structs ---------------------------------------------------------------------------------------


def _fields(struct: type[msgspec.Struct]) -> dict[str, Any]:  # Any: annotations are arbitrary type forms
    hints = get_type_hints(struct, include_extras=True)
    return {name: hints[name] for name in struct.__struct_fields__}


def _own_defaults(struct: type[msgspec.Struct]) -> object:
    return SimpleNamespace(**{f.name: f.default for f in msgspec.structs.fields(struct)})


def _struct_or_none(value: object) -> msgspec.Struct | None:
    return value if isinstance(value, msgspec.Struct) else None


def _nested(annotation: object) -> type[msgspec.Struct] | None:
    return annotation if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct) else None


def _item_struct(annotation: object) -> type[msgspec.Struct] | None:
    kind = msgspec.inspect.type_info(annotation)
    if isinstance(kind, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
        item = kind.item_type
        return item.cls if isinstance(item, msgspec.inspect.StructType) else None
    return None
