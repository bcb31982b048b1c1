"""Disks in a world, and the recordings of schedulers on them. Files are real ones, in a folder of their host; what
fails, what is written in part, and what a crash leaves of it is drawn."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from quire.clock import CLOCK
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.recording import files, recorder, replay
from scheduler_svc.recording.recorder import Recorder
from scheduler_svc.service import step_loop
from tests.sim.world.oracles import FalseAnswerError
from tests.sim.world.world import Node, World

_SHORT = 0.05
"""The share of writes that take a part of what they are given."""
_WRITE_S = 0.002
"""What a process dies in the middle of was written so shortly before."""
_COMPACTS_S = 2.0


@dataclass(frozen=True, slots=True)
class Recording:
    """How the schedulers of a world record. `traces` says whether they also trace their steps, to a disk that is full.

    Attributes:
        max_bytes: Of a recording; a fourth of it is a file.
    """

    max_bytes: int
    traces: bool


def draw_recording(draw: Random) -> Recording | None:
    """None where a world has none."""
    if draw.random() >= 0.2:
        return None
    return Recording(draw.choice((20_000, 100_000, 1 << 30)), draw.random() < 0.3)


class Disk:
    """The disk of a host. What is not synced is lost with the power of its machine."""

    def __init__(self, world: World, host: str) -> None:
        self.world, self.host = world, host
        self.folder = Path(tempfile.mkdtemp(prefix="disk-"))
        _DISKS[self.folder] = self
        self.num_outages = 0
        self.recorder: SimRecorder | None = None
        """That of the process that lives."""
        self.may_be_cut = False
        """Whether something may be missing at the end of a recording: a process was killed, or the disk failed."""
        self._chance = world.generator(f"disk of {host}")
        self._trouble: tuple[float, int] = (0.0, 0)
        self._synced: dict[int, int] = {}
        self._last: tuple[_File, int, float] | None = None
        self._open: list[_File] = []

    @property
    def recording(self) -> Path:
        return self.folder / "recording"

    def fail(self, error: int, seconds: float) -> None:
        """For some seconds what is written is refused with this error."""
        self.world.note("disk", self.host, errno.errorcode[error])
        self._trouble = self.world.now + seconds, error

    def open(self, path: Path) -> "_File":
        self._check()
        file = _File(self, path)
        self._open.append(file)
        return file

    def write(self, file: "_File", data: memoryview) -> int:
        """Writes all, or a part; a full disk takes what fits before it refuses."""
        count, is_short = len(data), self._chance.random() < _SHORT
        until, error = self._trouble
        if is_short or (self.world.now < until and error == errno.ENOSPC and self._chance.random() < 0.5):
            count = self._chance.randrange(count)
        if not is_short and count == len(data):
            self._check()
        self._last = file, file.raw.tell(), self.world.now
        return file.raw.write(data[: max(count, 1)]) or 0

    def sync(self, file: "_File") -> None:
        self._check()
        self._synced[file.inode] = file.raw.tell()

    def _check(self) -> None:
        until, error = self._trouble
        if self.world.now < until:
            self.may_be_cut = True
            raise OSError(error, os.strerror(error))

    def process_ended(self, *, has_power: bool) -> None:
        """By a kill, perhaps in the middle of a write; without power, what is not synced is lost in part."""
        self.may_be_cut, self.recorder = True, None
        if not has_power:
            self.num_outages += 1
            for path in sorted(self.folder.iterdir()):
                status = path.stat()
                kept = self._synced.get(status.st_ino, 0)
                if kept < status.st_size:
                    os.truncate(path, self._chance.randint(kept, status.st_size))
        elif self._last is not None:
            file, start, at = self._last
            if self.world.now - at < _WRITE_S and self._chance.random() < 0.5:
                file.raw.truncate(self._chance.randint(start, file.raw.tell()))

    def check(self) -> None:
        """Raises FalseAnswerError where a recording cannot be replayed, or another core would have planned otherwise,
        or something of it is missing for no reason."""
        living = self.recorder
        if living is not None:
            living.flush()
        for path in (self.recording, self.folder / "recording.old"):
            if not path.exists():
                continue
            is_whole = path == self.recording and living is not None and living.reason is None
            try:
                report = replay.replay(path, checks=False)
            except files.RecordingError as error:
                raise FalseAnswerError(f"the recording of {self.host}: {error}") from error
            if not report.is_equal or (report.damage and (is_whole or not self.may_be_cut)):
                raise FalseAnswerError(f"the recording of {self.host}: {report}")
            has_all = files.snapshot_path(path).exists() or report.num_operations == (living and living.num_put)
            if is_whole and not has_all:
                raise FalseAnswerError(f"the recording of {self.host} has {report.num_operations} operations")

    def close(self) -> None:
        for file in self._open:
            file.raw.close()
        del _DISKS[self.folder]
        shutil.rmtree(self.folder)


class _File:
    """A file that is written to."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self._disk = disk
        self.raw = path.open("wb", buffering=0)
        self.inode = os.fstat(self.raw.fileno()).st_ino

    def write(self, data: Any) -> int:
        return self._disk.write(self, memoryview(data))

    def sync(self) -> None:
        self._disk.sync(self)

    def close(self) -> None:
        self.raw.close()

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SimRecorder(Recorder):
    """A recorder whose thread is a job of its process, begun where something waits.

    Attributes:
        num_put: How many operations the core was told since the recording began.
        reason: Why it has ended.
    """

    def _start(self) -> None:
        self.num_put, self.reason, self._is_writing, self.has_closed = 0, None, False, False
        node = CLOCK.get()
        assert isinstance(node, Node)
        self.node = node

    def put(self, make: Callable[[], Any]) -> None:
        self.num_put += 1
        super().put(make)
        if not self._is_writing and self._is_open:
            self._is_writing = True
            self.node.run_job(self.flush)

    def flush(self) -> None:
        self._is_writing = False
        if not self._pending.empty():
            self._write_pending()

    def close(self) -> None:
        self.flush()
        self._writer.close()

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.reason: str | None = reason
            self.node._world.note("recording ends", self.node.host)
        super()._end(reason)


class _Compaction:
    """The process that replaces files by a snapshot. It outlives the scheduler that began it."""

    def __init__(self, command: list[Any], **_: Any) -> None:
        self._path, self._end = Path(command[3]), int(command[4])
        self._disk = _DISKS[self._path.parent]
        self._outage, self._error = self._disk.num_outages, ""
        self.returncode: int | None = None
        self._header = files.read_header(self._path)
        self._disk.world.after(self._disk._chance.uniform(0, _COMPACTS_S), self._run)

    def _run(self) -> None:
        if self.returncode is None and self._disk.num_outages == self._outage and self._disk.folder.exists():
            self.returncode = 0
            try:
                replay.compact(self._path, self._header, self._end)
            except (files.RecordingError, OSError) as error:
                self.returncode, self._error = 1, str(error)

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self) -> tuple[None, str]:
        return None, self._error

    def kill(self) -> None:
        self.returncode = -9


_DISKS: dict[Path, Disk] = {}
"""By folder: what runs outside of a process of the world knows no other name."""


@contextmanager
def simulated_disks(
    disks: Callable[[], Mapping[str, Disk]], make: Callable[[SchedulerConfig, Recorder], Any]
) -> Iterator[None]:
    """Inside the block, recordings are on these disks, by host, and `make` makes the cores that are recorded."""

    def open_recorder(path: str, *, with_token_ids: bool, max_bytes: int) -> Recorder | None:
        disk = _DISKS[Path(path).parent]
        found = disk.recorder = SimRecorder.open(path, with_token_ids=with_token_ids, max_bytes=max_bytes)
        return found

    def make_scheduler(self: SimRecorder, config: SchedulerConfig) -> Any:
        return make(config, self)

    with ExitStack() as stack:
        for target, name, value in (
            (files, "open_file", lambda path: _DISKS[path.parent].open(path)),
            (files, "sync", _File.sync),
            (replay, "sync", _File.sync),
            (recorder, "subprocess", SimpleNamespace(Popen=_Compaction, DEVNULL=None, PIPE=None)),
            (SimRecorder, "make_scheduler", make_scheduler),
            (step_loop, "Recorder", SimpleNamespace(open=open_recorder)),
        ):
            stack.enter_context(patch.object(target, name, value))
        try:
            yield
        finally:
            for disk in disks().values():
                disk.close()
