"""The header of a GGUF file, or of the parts of a model: its metadata, and where each tensor is. Read without the
tensors, and without torch.

The package `gguf` reads headers too, by a numpy array for each element of a list: 10 s and 700 MB for a vocabulary of
128,000 tokens, where this takes less than a second (ADR 42). Its code brings the tensors to floating point, in workers.
"""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire.runtime.settings import ConfigurationError

SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Several times the size of the largest models. A damaged or malicious file must not take memory without bound.
_MAX_ENTRIES = 1 << 20
_MAX_ELEMENTS = 1 << 23
_MAX_TEXT_BYTES = 1 << 24
_MAX_METADATA_BYTES = 1 << 28
_MAX_DIMENSIONS = 4
_MAX_SIZE = (1 << 31) - 1
_MAX_FLOAT_32 = 3.4e38
LFS_POINTER = b"version https://git-lfs"

_SENTENCE_PIECE = {"unknown": 0, "bos": 1, "eos": 2}
"""Token ids of tokenizers of SentencePiece that a file leaves out, as in llama.cpp."""
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def part_names(name: str) -> tuple[str, ...]:
    """The names of all files of a model, in order, including `name`: several if it ends as the parts of llama.cpp's
    `gguf-split`, in -00002-of-00003.gguf."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return (name,)
    count = int(match["count"])
    return tuple(f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of these names in the directory of `path`. ConfigurationError if one of them is missing."""
    found = tuple(path.with_name(name) for name in part_names(path.name))
    for part in found:
        if not part.is_file():
            raise ConfigurationError(f"{path} is one of {len(found)} parts of a model; {part.name} is not next to it")
    return found


def name_of_model(path: Path) -> str:
    """The name of a file without the suffix and the number of the part."""
    match = _PART.fullmatch(path.name)
    return path.stem if match is None else match["stem"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        ggml_type: The number of its type, a `gguf.GGMLQuantizationType`.
        shape: Outermost dimension first, as torch has it.
        start: The offset of its first byte in the file.
        end: The offset before which its last byte is; padding may be between.
    """

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The description of a model. Values of the metadata are numbers, texts, bools, and lists of these.

    Attributes:
        path: The file, or the first of the parts.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def read(cls, path: Path) -> Self:
        """The header of a file, or of all parts if it is one of several.

        Raises:
            ConfigurationError: one line: it is not a GGUF file, is damaged, or parts are missing or of several models.
        """
        first, *others = (cls._read_file(part) for part in parts_of(path))
        tensors = dict(first.tensors)
        for other in others:
            tensors.update(other.tensors)
        first._check_parts([first, *others], len(tensors))
        return cls(first.path, first.metadata, tensors)

    @classmethod
    def _read_file(cls, path: Path) -> Self:
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return cls._parse(path, content)
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigurationError(f"{path} cannot be read as a GGUF file: {error}") from error

    def _check_parts(self, parts: "list[GgufHeader]", num_tensors: int) -> None:
        num_parts = self.metadata.get("split.count") or 1
        if not isinstance(num_parts, int):
            raise ConfigurationError(f"{self.path}: split.count is {num_parts!r:.80}, not a number")
        if num_parts != len(parts):
            raise ConfigurationError(
                f"{self.path} is the first of {num_parts} parts of a model; give them the names that they had, which "
                f"end in -00001-of-{num_parts:05}.gguf and so on"
            )
        for number, part in enumerate(parts):
            if len(parts) > 1 and part.metadata.get("split.no") != number:
                raise ConfigurationError(f"{part.path} has the name of part {number + 1} and is another one")
        expected = self.metadata.get("split.tensors.count", num_tensors)
        if len(parts) > 1 and num_tensors != expected:
            raise ConfigurationError(
                f"{self.path} and the parts next to it have {num_tensors} tensors, and {expected} are expected; they "
                "are parts of several models"
            )

    @classmethod
    def _parse(cls, path: Path, content: mmap.mmap) -> Self:
        reader = _Reader(content)
        reader.check_beginning()
        num_tensors, num_entries = reader.count("tensors"), reader.count("fields")
        metadata = dict(reader.field() for _ in range(num_entries))
        if len(metadata) < num_entries:
            raise ValueError("it has several fields of one name")
        found = [reader.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r:.80}")
        data = -(-reader.place // alignment) * alignment
        found.sort(key=lambda tensor: tensor[3])
        starts = [data + offset for *_, offset in found]
        tensors: dict[str, GgufTensor] = {}
        # Not strict: a file without tensors has no last tensor to end with it. Such files exist.
        for (name, kind, shape, _), start, end in zip(found, starts, [*starts[1:], len(content)], strict=False):
            if start >= len(content):
                raise ValueError(f"tensor {name!r:.80} begins after its end; the file is cut short")
            if name in tensors:
                raise ValueError(f"it has two tensors {name!r:.80}")
            tensors[name] = GgufTensor(name, kind, shape, path, start, end)
        return cls(path, metadata, tensors)


def _as_written(value: float) -> float:
    """A number as it was before it was stored in 32 bits: 1e-06, not 9.999999974752427e-07."""
    if abs(value) < _MAX_FLOAT_32:
        for digits in (6, 7, 8):
            short = float(f"{value:.{digits}g}")
            if struct.unpack("<f", struct.pack("<f", short))[0] == value:
                return short
    return value


class GgufFields:
    """The metadata of a model, checked as it is read; errors name the file."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self._lists: dict[str, list[str]] = {}
        self.architecture = self.text("general.architecture")

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.header.path}: {problem}")

    def text(self, key: str, default: str | None = None) -> str:
        return self._typed(key, str, "a text") if default is None or key in self.header.metadata else default

    def texts(self, key: str) -> list[str]:
        if key not in self._lists:
            values = self._typed(key, list, "a list of texts")
            if not all(isinstance(value, str) for value in values):
                raise self.error(f"{key} is not a list of texts")
            self._lists[key] = values
        return self._lists[key]

    def shared(self, key: str) -> float | None:
        """A number that does not depend on the architecture, by its whole key; None if it is missing."""
        if key not in self.header.metadata:
            return None
        value = self._typed(key, (int, float), "a number")
        if not math.isfinite(value):
            raise self.error(f"{key} is {value}, which is not finite")
        return value if isinstance(value, int) else _as_written(value)

    def has(self, name: str) -> bool:
        """Whether the architecture has the field: "block_count" is llama.block_count."""
        return self._key(name) in self.header.metadata

    def own(self, name: str, kind: type | tuple[type, ...], expected: str, default: Any = None) -> Any:
        """A field of the architecture, of one of the types."""
        if default is not None and not self.has(name):
            return default
        return self._typed(self._key(name), kind, expected)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 on, which may be a list of that number for each layer."""
        given = self.own(name, (int, list), "a whole number", default)
        return self._only_size(name, given, given if isinstance(given, list) else [given])

    def size_of_some(self, name: str, default: int | None = None) -> int:
        """As `size`, of a field that may be 0 for layers that do not have what it counts."""
        given = self.own(name, (int, list), "a whole number", default)
        return self._only_size(
            name, given, [each for each in given if each != 0] if isinstance(given, list) else [given]
        )

    def _only_size(self, name: str, given: Any, values: list[Any]) -> int:
        value, *others = dict.fromkeys(values) or [None]
        if others or type(value) is not int:
            problem = "which differs by layer; such models are not read" if others else "not a whole number"
            raise self.error(f"{self._key(name)} is {given!r:.80}, {problem}")
        if not 1 <= value <= _MAX_SIZE:
            raise self.error(f"{self._key(name)} is {value}; expected is a number from 1 to {_MAX_SIZE}")
        return value

    def sizes(self, name: str, count: int, minimum: int = 1) -> list[int]:
        """As `size`, for each of `count` layers, which may differ."""
        given = self.own(name, (int, list), "a whole number or a list")
        found = given if isinstance(given, list) else [given] * count
        if len(found) != count or not all(type(each) is int and minimum <= each <= _MAX_SIZE for each in found):
            expected = f"{count} numbers from {minimum} to {_MAX_SIZE}"
            raise self.error(f"{self._key(name)} is {given!r:.80}; expected are {expected}")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        value = self.own(name, (int, float), "a number", default)
        if not math.isfinite(value):
            raise self.error(f"{self._key(name)} is {value}, which is not finite")
        return _as_written(value)

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.number(name, default)
        if value <= 0:
            raise self.error(f"{self._key(name)} is {value}; expected is a number above 0")
        return value

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.header.metadata.get(key)
        if value is None and self.header.metadata.get("tokenizer.ggml.model") == "llama":
            value = _SENTENCE_PIECE.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.texts("tokenizer.ggml.tokens")):
            raise self.error(f"{key} is {value!r:.80}, which is no token of the vocabulary")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "true or false") if key in self.header.metadata else default

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _typed(self, key: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.header.metadata.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            said = "missing" if value is None else f"{value!r:.80}, not {expected}"
            raise self.error(f"{key} is {said}")
        return value


class _Reader:
    """Reads one value after another. Raises ValueError for values that no file of a model has."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._num_elements = 0
        self.place = 0

    def check_beginning(self) -> None:
        if self._content[: len(LFS_POINTER)] == LFS_POINTER:
            raise ValueError("it is a pointer of Git LFS; `git lfs pull` fetches the file")
        if self._content[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.place = 4
        version = self.number("I")
        if version and not version & 0xFFFF:
            raise ValueError("it is in big-endian byte order; `gguf-convert-endian` of the package gguf changes that")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; versions 2 and 3 are read, convert the model again")

    def number(self, code: str) -> Any:
        (value,) = self._unpack(f"<{code}")
        return value

    def count(self, what: str) -> int:
        value = self.number("Q")
        if value > _MAX_ENTRIES:
            raise ValueError(f"it counts {value} {what}; at most {_MAX_ENTRIES} are read")
        return value

    def text(self) -> str:
        length = self.number("Q")
        if length > _MAX_TEXT_BYTES:
            raise ValueError(
                f"it has a text of {length} bytes at byte {self.place}; at most {_MAX_TEXT_BYTES} are read"
            )
        # Some vocabularies have tokens that are not UTF-8, as others have them in JSON.
        return self._read_bytes(length).decode("utf-8", errors="replace")

    def _texts(self, count: int) -> list[str]:
        """Same as `count` calls of `text`, in half the time: a vocabulary has more than 100,000."""
        content, place, found = self._content, self.place, list[str]()
        end = min(len(content), _MAX_METADATA_BYTES)
        for _ in range(count):
            start = place + 8
            length = int.from_bytes(content[place:start], "little")
            if length > _MAX_TEXT_BYTES or start + length > end:
                self.place = place
                self.text()  # raises the error
            place = start + length
            found.append(content[start:place].decode("utf-8", errors="replace"))
        self.place = place
        return found

    def name(self) -> str:
        """A text that messages may show."""
        text = self.text()
        if not text.isprintable():
            raise ValueError(f"it has the name {text!r:.80}")
        return text

    def field(self) -> tuple[str, Any]:
        """A key of the metadata and its value."""
        key, kind = self.name(), self.number("I")
        if kind == _STRING:
            return key, self.text()
        if kind != _ARRAY:
            return key, self.number(self._code_of(kind, key))
        kind, length = self.number("I"), self.number("Q")
        self._num_elements += length
        if self._num_elements > _MAX_ELEMENTS:
            raise ValueError(f"its lists have more than {_MAX_ELEMENTS} elements up to {key!r:.80}")
        if kind == _STRING:
            return key, self._texts(length)
        return key, list(self._unpack(f"<{length}{self._code_of(kind, key)}"))

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, num_dimensions = self.name(), self.number("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r:.80} has {num_dimensions} dimensions")
        shape = tuple(reversed([self.number("Q") for _ in range(num_dimensions)]))
        if 0 in shape:
            raise ValueError(f"tensor {name!r:.80} has shape {list(shape)}, which is empty")
        return name, self.number("I"), shape, self.number("Q")

    def _code_of(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"the type of {key!r:.80} is {kind}, which is unknown here")
        return _SCALARS[kind]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._read_bytes(struct.calcsize(layout)))

    def _read_bytes(self, num_bytes: int) -> bytes:
        if self.place + num_bytes > _MAX_METADATA_BYTES:
            raise ValueError(f"its metadata goes beyond {_MAX_METADATA_BYTES} bytes")
        data = self._content[self.place : self.place + num_bytes]
        if len(data) < num_bytes:
            raise ValueError("it ends within its metadata; the file is cut short")
        self.place += num_bytes
        return data
