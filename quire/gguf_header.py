"""The header of a GGUF file: its metadata, and where each tensor is. Read without the tensors, and without torch.

The package `gguf` reads headers too, by a numpy array for each element of a list: 10 s and 700 MB for a vocabulary of
128,000 tokens, where this takes less than a second (ADR 42). Its code brings the tensors to floating point, in workers.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire.settings import ConfigurationError

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# More than any file has: a damaged length must not allocate memory.
_MAX_ENTRIES = 1 << 24
_MAX_DIMENSIONS = 4

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file.

    Attributes:
        ggml_type: The number of its type, a `gguf.GGMLQuantizationType`.
        shape: Outermost dimension first, as torch has it.
        start: The offset of its first byte in the file.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a file says of itself. Values of the metadata are numbers, texts, bools, and lists of these."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigurationError, one line, where it is not a GGUF file, is damaged, or is one part of several."""
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                header = cls._parse(path, content)
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        except (struct.error, ValueError, KeyError) as error:
            raise ConfigurationError(f"{path} is not a GGUF file, or is damaged: {error}") from error
        num_parts = header.metadata.get("split.count", 0)
        if isinstance(num_parts, int) and num_parts > 1:
            raise ConfigurationError(
                f"{path} is one of {num_parts} parts of a model; join them: gguf-split --merge {path} WHOLE.gguf"
            )
        return header

    @classmethod
    def _parse(cls, path: Path, content: mmap.mmap) -> Self:
        reader = _Reader(content)
        if content[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        reader.place = 4
        version = reader.number("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; versions 2 and 3 are read, in little-endian")
        num_tensors, num_entries = reader.count(), reader.count()
        metadata = {reader.text(): reader.value(reader.number("I")) for _ in range(num_entries)}
        found = [reader.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r:.80}")
        data = -(-reader.place // alignment) * alignment
        tensors = {name: GgufTensor(name, kind, shape, data + offset) for name, kind, shape, offset in found}
        for tensor in tensors.values():
            if tensor.start >= len(content):
                raise ValueError(f"tensor {tensor.name} begins after its end; the file is cut short")
        return cls(path, metadata, tensors)

    def sized(self) -> list[tuple[GgufTensor, int]]:
        """Each tensor with the offset before which its last byte is; padding may be between."""
        by_place = sorted(self.tensors.values(), key=lambda tensor: tensor.start)
        ends = [tensor.start for tensor in by_place[1:]] + [self.path.stat().st_size]
        return list(zip(by_place, ends, strict=True))


class _Reader:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.place = 0

    def number(self, code: str) -> Any:
        layout = struct.Struct(f"<{code}")
        (value,) = layout.unpack_from(self._content, self.place)
        self.place += layout.size
        return value

    def count(self) -> int:
        value = self.number("Q")
        if value > _MAX_ENTRIES:
            raise ValueError(f"it counts {value} entries at byte {self.place}")
        return value

    def text(self) -> str:
        length = self.number("Q")
        data = self._content[self.place : self.place + length]
        if len(data) < length:
            raise ValueError("it ends within a text; the file is cut short")
        self.place += length
        # Some vocabularies have tokens that are not UTF-8, as others have them in JSON.
        return data.decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        kind, length = self.number("I"), self.count()
        if kind in _SCALARS:
            layout = struct.Struct(f"<{length}{_SCALARS[kind]}")
            values = list(layout.unpack_from(self._content, self.place))
            self.place += layout.size
            return values
        return [self.value(kind) for _ in range(length)]

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dimensions = self.text(), self.number("I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(num_dimensions)]))
        return name, self.number("I"), shape, self.number("Q")
