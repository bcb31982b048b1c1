"""The files of a recording.

A file is a magic number and frames: length, checksum, content. The first frame is the header. A recording that grew too
large for one file continues in others:

    FILE            the newest
    FILE.3, FILE.4  the files before it, complete
    FILE.snapshot   the core before the oldest of these, if earlier files were removed
"""

import os
import struct
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from google.protobuf.message import DecodeError

from quire.runtime import clock, entropy
from quire.runtime.settings import ConfigurationError
from quire.version import VERSION
from scheduler_svc.recording.messages import Header

FORMAT_VERSION = 1
_MAGIC = b"quire recording\n"
_FRAME = struct.Struct("<II")


class RecordingError(Exception):
    """A file that cannot be replayed. The message is one line that names it."""


class DamagedError(RecordingError):
    """A file is cut or changed; the frames before the damage are whole."""


def new_header(*, has_token_ids: bool) -> Header:
    """The header of the first file of a recording."""
    return Header(
        format_version=FORMAT_VERSION,
        recording_id=entropy.random_bytes(8),
        version=VERSION,
        has_token_ids=has_token_ids,
        started_unix_seconds=clock.unix_s(),
    )


def header_of(other: Header, segment: int) -> Header:
    """The header of another file of the same recording."""
    header = Header()
    header.CopyFrom(other)
    header.segment = segment
    return header


def frame(content: bytes) -> bytes:
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def open_file(path: Path) -> BinaryIO:
    """Opens an empty file for writing. A simulation replaces this function."""
    return path.open("wb", buffering=0)


def sync(file: BinaryIO) -> None:
    """Returns once the written data would survive a loss of power. A simulation replaces this function."""
    os.fsync(file.fileno())


def append(file: BinaryIO, content: bytes | bytearray) -> None:
    """Writes all of the content: a disk that is almost full writes only a part, without an error. Raises OSError."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def create(path: Path, header: Header) -> BinaryIO:
    """Creates a file of a recording, to append frames to. Raises OSError if it cannot be written. Neither then nor
    after a crash is there a file with a part of its header, which could not be replayed nor set aside."""
    file, new = _begin(path, header)
    new.replace(path)
    return file


def go_on(path: Path, header: Header) -> BinaryIO:
    """As `create`; the newest file so far becomes the segment before this one. After an OSError it stays the newest."""
    file, new = _begin(path, header)
    _link(path, segment_path(path, header.segment - 1))
    new.replace(path)
    return file


def _begin(path: Path, header: Header) -> tuple[BinaryIO, Path]:
    new = path.with_name(f"{path.name}.new")
    file = open_file(new)
    append(file, _MAGIC + frame(header.SerializeToString()))
    sync(file)
    return file, new


def _link(path: Path, kept: Path) -> None:
    """Gives a file another name, in addition to its own if the file system can: after a crash it has one of them."""
    kept.unlink(missing_ok=True)
    try:
        kept.hardlink_to(path)
    except OSError:
        path.rename(kept)


def open_frames(path: Path) -> tuple[Header, Generator[bytes]]:
    """The header and the frames after it, which may raise DamagedError. Raises RecordingError."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}") from error
    if file.read(len(_MAGIC)) != _MAGIC:
        file.close()
        raise RecordingError(f"{path} is no recording of a scheduler")
    frames = _frames(path, file)
    try:
        header = Header.FromString(next(frames))
    except (DamagedError, StopIteration, DecodeError):
        raise RecordingError(f"{path} is damaged at its start; nothing of it can be replayed") from None
    if header.format_version != FORMAT_VERSION:
        raise RecordingError(
            f"{path} has format {header.format_version}; this version of Quire, {VERSION}, reads format "
            f"{FORMAT_VERSION}: use Quire {header.version}"
        )
    return header, frames


def read_header(path: Path) -> Header:
    """The header of a file. Raises RecordingError if it is no recording."""
    header, frames = open_frames(path)
    frames.close()
    return header


def _frames(path: Path, file: BinaryIO) -> Generator[bytes]:
    with file:
        while prefix := file.read(_FRAME.size):
            at = file.tell() - len(prefix)
            if len(prefix) < _FRAME.size:
                raise DamagedError(f"{path} is cut at byte {at}")
            size, checksum = _FRAME.unpack(prefix)
            # Checked before the allocation: a damaged size may be gigabytes.
            if size > os.fstat(file.fileno()).st_size - file.tell():
                raise DamagedError(f"{path} is cut or damaged at byte {at}")
            content = file.read(size)
            if zlib.crc32(content) != checksum:
                raise DamagedError(f"{path} is damaged at byte {at}")
            yield content


def segment_path(path: Path, segment: int) -> Path:
    return path.with_name(f"{path.name}.{segment}")


def snapshot_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.snapshot")


def set_aside(path: Path) -> None:
    """Renames the files of an earlier recording to FILE.old and so on, replacing files with these names. Raises
    ConfigurationError if the file is not a recording, or cannot be renamed."""
    if not path.exists():
        return
    try:
        read_header(path)
    except RecordingError as error:
        raise ConfigurationError(f"--record {path}: the file exists, and it would be overwritten: {error}") from error
    old = path.with_name(f"{path.name}.old")
    try:
        old.unlink(missing_ok=True)
        for stale in _other_files(old):
            stale.unlink()
        for other in _other_files(path):
            other.rename(old.with_name(old.name + other.suffix))
        path.rename(old)
    except OSError as error:
        raise ConfigurationError(f"--record {path}: cannot set the earlier recording aside: {error}") from error


def _other_files(path: Path) -> list[Path]:
    """The snapshot of a recording, and its files before the newest."""
    others = [each for each in path.parent.iterdir() if each.stem == path.name and each.suffix[1:].isdigit()]
    return [*others, *filter(Path.exists, [snapshot_path(path)])]
