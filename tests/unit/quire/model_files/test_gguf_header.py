"""Headers of damaged and malicious GGUF files, and of files of another kind."""

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.model_files.gguf_header import GgufFields, GgufHeader, part_names
from quire.runtime.settings import ConfigurationError

U8, U32, F32, STRING, ARRAY, U64, F64 = 0, 4, 6, 8, 9, 10, 12


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: Sequence[int] = (4,), *, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    num_tensors, num_fields = counts or (len(tensors), len(fields))
    return struct.pack("<4sIQQ", b"GGUF", version, num_tensors, num_fields) + b"".join([*fields, *tensors])


def error_of(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    with pytest.raises(ConfigurationError) as caught:
        GgufHeader.read(file)
    message = str(caught.value)
    assert message.startswith(f"{file} cannot be read as a GGUF file: ")
    assert "\n" not in message
    assert len(message) < 400 + len(str(file))
    return message.split("GGUF file: ")[1]


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "cannot mmap an empty file"),
        (b"GGML" + bytes(100), "it does not begin with GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a pointer of Git LFS; `git lfs pull`"),
        (header(version=1), "its version is 1; versions 2 and 3 are read, convert the model again"),
        (header(version=3 << 24), "it is in big-endian byte order; `gguf-convert-endian`"),
        (b"GGUF\3\0", "it ends within its metadata; the file is cut short"),
        (header(counts=(HUGE, 0)), f"it counts {HUGE} tensors; at most 1048576 are read"),
        (header(counts=(0, HUGE)), f"it counts {HUGE} fields; at most"),
        (header([struct.pack("<Q", HUGE)]), f"it has a text of {HUGE} bytes at byte 32; at most 16777216 are read"),
        (
            header([field("a", ARRAY, struct.pack("<IQ", U8, HUGE))]),
            "its lists have more than 8388608 elements up to 'a'",
        ),
        (header([field("a", ARRAY, struct.pack("<IQ", U64, 1 << 22))]), "it ends within its metadata"),
        (header([field("a", 99, b"")]), "the type of 'a' is 99, which is unknown here"),
        (header([field("a\nb", U8, b"\0")]), r"it has the name 'a\nb'"),
        (header([field("a", U8, b"\0")] * 2), "it has several fields of one name"),
        (header([], [tensor("t", (1,) * 5)]), "tensor 't' has 5 dimensions"),
        (header([], [tensor("t", (4, 0))]), "tensor 't' has shape [0, 4], which is empty"),
        (header([], [tensor("t"), tensor("t", offset=32)]) + bytes(99), "it has two tensors 't'"),
        (header([], [tensor("t", offset=HUGE)]) + bytes(99), "tensor 't' begins after its end; the file is cut short"),
        (header([field("general.alignment", U32, bytes(4))]), "general.alignment is 0"),
    ],
)
def test_what_is_no_header_is_refused_in_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    assert error_of(tmp_path / "m.gguf", content).startswith(problem)


def test_metadata_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.model_files.gguf_header._MAX_METADATA_BYTES", 1 << 16)
    many = [field(f"{number:05}", STRING, text("x" * 500)) for number in range(1000)]
    assert error_of(tmp_path / "m.gguf", header(many)) == "its metadata goes beyond 65536 bytes"
    lists = [field(str(number), ARRAY, struct.pack("<IQ", STRING, 1000) + text("") * 1000) for number in range(5)]
    monkeypatch.setattr("quire.model_files.gguf_header._MAX_ELEMENTS", 4500)
    assert error_of(tmp_path / "m.gguf", header(lists)) == "its lists have more than 4500 elements up to '4'"


def test_parts_that_are_counted_wrongly_are_none(tmp_path: Path) -> None:
    for name in ("m-00000-of-00000.gguf", "m-00005-of-00003.gguf", "m-1-of-3.gguf"):
        assert part_names(name) == (name,)
    file = tmp_path / "m.gguf"
    file.write_bytes(header([field("split.count", STRING, text("two"))]))
    with pytest.raises(ConfigurationError, match=r"m\.gguf: split\.count is 'two', not a number"):
        GgufHeader.read(file)


def test_numbers_are_as_they_were_before_they_were_stored_in_32_bits(tmp_path: Path) -> None:
    file, numbers = tmp_path / "m.gguf", (1e-6, 1e-5, 0.6, 1_000_000.0, 10_000.0, 0.15467668, 3.4028234663852886e38)
    fields = [field(f"llama.{index}", F32, struct.pack("<f", each)) for index, each in enumerate(numbers)]
    fields += [
        field("general.architecture", STRING, text("llama")),
        field("llama.wide", F64, struct.pack("<d", 0.1 + 1e-12)),
        field("llama.nan", F32, struct.pack("<f", float("nan"))),
        field("llama.none", F32, bytes(4)),
        field("llama.many", U32, struct.pack("<I", 1 << 31)),
    ]
    file.write_bytes(header(fields))
    read = GgufFields(GgufHeader.read(file))
    assert [read.number(str(index)) for index in range(len(numbers))] == list(numbers)
    assert read.number("wide") == 0.1 + 1e-12
    with pytest.raises(ConfigurationError, match=r"llama\.nan is nan, which is not finite"):
        read.number("nan")
    with pytest.raises(ConfigurationError, match=r"llama\.none is 0.*; expected is a number above 0"):
        read.positive("none")
    with pytest.raises(
        ConfigurationError, match=r"llama\.many is 2147483648; expected is a number from 1 to 2147483647"
    ):
        read.size("many")
