"""Reads what a GGUF file says about itself: its key-value metadata and the types of its tensors, never the weights.

Own reader, since the reference package takes seconds for what is a tenth of a second of work. Every length in the file
is checked against the file before anything of that length is read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from laneway.core.errors import ConfigError

Scalar = int | float | bool | str
Value = Scalar | list[Scalar]

_STRING, _ARRAY = 8, 9
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
TENSOR_TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    30: "BF16",
}


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    path: Path
    values: dict[str, Value]
    tensor_types: frozenset[str]

    def text(self, key: str, default: str = "") -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise ConfigError(f"{self.path}: {key} is no text")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if not isinstance(value, int):
            raise ConfigError(f"{self.path}: {key} is missing or no integer")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.values.get(key, default))

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"{self.path}: {key} is missing or no list of texts")
        return [str(v) for v in value]

    def numbers(self, key: str) -> list[int]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            raise ConfigError(f"{self.path}: {key} is missing or no list of integers")
        return [int(v) for v in value]

    @property
    def context_length(self) -> int:
        return self.number(f"{self.text('general.architecture')}.context_length")


def read_gguf(path: Path) -> GgufMetadata:
    """Raises ConfigError saying what is wrong with the file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the file: {error.strerror or error}") from error
    except (ValueError, struct.error, IndexError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a sound GGUF file: {error}") from error


def _read(path: Path, data: mmap.mmap) -> GgufMetadata:
    if data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    reader = _Reader(data, at=4)
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}; this reader knows 2 and 3")
    tensors, pairs = reader.count(), reader.count()
    values: dict[str, Value] = {}
    for _ in range(pairs):
        key = reader.string()
        values[key] = reader.value(int(reader.scalar("<I")))
    types: set[str] = set()
    for _ in range(tensors):
        reader.string()
        dimensions = int(reader.scalar("<I"))
        reader.skip(8 * dimensions)
        kind = int(reader.scalar("<I"))
        types.add(TENSOR_TYPES.get(kind, f"type {kind}"))
        reader.skip(8)
    return GgufMetadata(path, values, frozenset(types))


class _Reader:
    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self._at = at

    def skip(self, length: int) -> int:
        """Moves on by `length` bytes and says where they begin."""
        at = self._at
        if length > len(self._data) - at:
            raise ValueError("it is cut off")
        self._at = at + length
        return at

    def scalar(self, kind: str) -> int | float:
        found: int | float = struct.unpack_from(kind, self._data, self.skip(struct.calcsize(kind)))[0]
        return found

    def count(self) -> int:
        found = int(self.scalar("<Q"))
        if found > len(self._data):
            raise ValueError("a count is larger than the file")
        return found

    def string(self) -> str:
        length = self.count()
        at = self.skip(length)
        return self._data[at : at + length].decode()

    def value(self, kind: int) -> Value:
        if kind != _ARRAY:
            return self._scalar_value(kind)
        inner = int(self.scalar("<I"))
        count = self.count()
        if inner == _STRING:
            return [self.string() for _ in range(count)]
        layout = self._format(inner)
        at = self.skip(struct.calcsize(layout) * count)
        return list(struct.unpack_from(f"<{count}{layout[1]}", self._data, at))

    def _scalar_value(self, kind: int) -> Scalar:
        return self.string() if kind == _STRING else self.scalar(self._format(kind))

    def _format(self, kind: int) -> str:
        layout = _FORMATS.get(kind)
        if layout is None:
            raise ValueError(f"unknown value type {kind}")
        return layout
