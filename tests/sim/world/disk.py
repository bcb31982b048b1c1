"""Disks in a world, and the recordings of schedulers on them. Files are real, in a folder for each host; failures,
partial writes and the state after a crash are drawn."""

import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from quire.runtime.clock import CLOCK
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.recording import files, recorder, replay
from scheduler_svc.recording.recorder import Recorder
from scheduler_svc.recording.replay import Replayer
from scheduler_svc.service import replica, step_loop
from scheduler_svc.service.tracing import StepTrace
from tests.sim.world.oracles import FalseAnswerError
from tests.sim.world.world import Node, World

_SHORT = 0.05
"""The share of writes that write only a part of their data."""
_WRITE_S = 0.002
"""A process may be killed in the middle of a write for this many seconds after it."""
_COMPACTS_S = 0.3


@dataclass(frozen=True, slots=True)
class Recording:
    """How the schedulers of a world record. `traces` says whether they also trace their steps, to a full disk.

    Attributes:
        max_bytes: Maximum size of a recording, which has files of a fourth of that.
    """

    max_bytes: int
    traces: bool


def draw_recording(draw: Random) -> Recording | None:
    """Draws how schedulers record; None if they do not."""
    if draw.random() >= 0.2:
        return None
    return Recording(draw.choice((6_000, 30_000, 1 << 30)), draw.random() < 0.3)


class Disk:
    """The disk of a host. Data that is not synced is lost with the power of its machine.

    Attributes:
        max_bytes: Maximum size of a recording.
        recorder: The recorder of the live process.
        num_outages: Number of power failures.
        may_be_cut: Whether a recording may lack its end: a process was killed, or the disk failed.
    """

    def __init__(self, world: World, host: str, max_bytes: int) -> None:
        self.world, self.host, self.max_bytes = world, host, max_bytes
        self.folder = Path(tempfile.mkdtemp(prefix="disk-"))
        self.recording = self.folder / "recording"
        self.recorder: SimRecorder | None = None
        self.num_outages, self.may_be_cut = 0, False
        self.chance = world.generator(f"disk of {host}")
        self._trouble: tuple[float, int] = (0.0, 0)
        self._is_out_of_inodes = False
        """Whether only new files are refused, for lack of inodes."""
        self._synced: dict[int, int] = {}
        self._last: tuple[_File, int, float] | None = None
        self.files: list[_File] = []
        _DISKS[self.folder] = self

    def fail(self, error: int, seconds: float) -> None:
        """Refuses writes with this error for some seconds."""
        self.world.note("disk", self.host, errno.errorcode[error])
        self._trouble = self.world.now + seconds, error
        self._is_out_of_inodes = error == errno.ENOSPC and self.chance.random() < 0.4

    def check_works(self) -> None:
        """Raises OSError while the disk fails."""
        until, error = self._trouble
        if self.world.now < until:
            self.may_be_cut = True
            raise OSError(error, os.strerror(error))

    def taken(self, file: "_File", data: memoryview) -> memoryview:
        """The part of a write that the disk accepts. A full disk accepts the bytes that fit before it refuses."""
        until, error = self._trouble
        fits = self.world.now < until and error == errno.ENOSPC and self.chance.random() < 0.5
        self._last = file, file.tell(), self.world.now
        if fits or self.chance.random() < _SHORT:
            return data[: self.chance.randint(1, len(data))]
        if not self._is_out_of_inodes:
            self.check_works()
        return data

    def sync(self, file: "_File") -> None:
        self.check_works()
        self._synced[os.fstat(file.fileno()).st_ino] = file.tell()

    def process_ended(self, *, has_power: bool) -> None:
        """The process ends by a kill, perhaps in the middle of a write. Without power, some unsynced data is lost."""
        self.may_be_cut, self.recorder = True, None
        if not has_power:
            self.num_outages += 1
            for path in sorted(self.folder.iterdir()):
                status = path.stat()
                kept = min(self._synced.get(status.st_ino, 0), status.st_size)
                os.truncate(path, self.chance.randint(kept, status.st_size))
        elif self._last is not None:
            file, start, at = self._last
            if not file.closed and self.world.now - at < _WRITE_S and self.chance.random() < 0.5:
                file.truncate(self.chance.randint(start, file.tell()))

    def check(self) -> None:
        """Raises FalseAnswerError if a recording cannot be replayed, if another core would have planned otherwise, or
        if something is missing without a reason."""
        living = self.recorder
        if living is not None:
            living.flush()
            has_reason = self.may_be_cut or "not yet replaced" in (living.reason or "not yet replaced")
            if not has_reason:
                raise FalseAnswerError(f"the recording of {self.host} ends: {living.reason}")
        for path in (self.recording, self.folder / "recording.old"):
            if not path.exists():
                if path == self.recording and living is not None:
                    raise FalseAnswerError(f"the recording of {self.host} is gone")
                continue
            is_whole = path == self.recording and living is not None and living.reason is None
            try:
                report = replay.replay(path)
            except files.RecordingError as error:
                raise FalseAnswerError(f"the recording of {self.host}: {error}") from error
            if not report.is_equal or (report.damage and (is_whole or not self.may_be_cut)):
                raise FalseAnswerError(f"the recording of {self.host}: {report}")
            has_all = files.snapshot_path(path).exists() or report.num_operations == (living and living.num_put)
            if is_whole and not has_all:
                raise FalseAnswerError(f"the recording of {self.host} has {report.num_operations} operations")

    def close(self) -> None:
        for file in self.files:
            file.close()
        del _DISKS[self.folder]
        shutil.rmtree(self.folder)


class _File(io.FileIO):
    """A file opened for writing."""

    def __init__(self, path: Path) -> None:
        self.disk = _DISKS[path.parent]
        self.disk.check_works()
        super().__init__(path, "wb")
        self.disk.files.append(self)

    def write(self, data: Any) -> int:
        return super().write(self.disk.taken(self, memoryview(data)))


class _FullDevice(io.RawIOBase):
    """The file of a trace of steps, on a full disk. A real one would stay open when its process is killed."""

    name = "steps.json"

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _open_trace(path: str | None) -> StepTrace:
    return StepTrace(None if path is None else io.TextIOWrapper(io.BufferedWriter(_FullDevice())))


class SimRecorder(Recorder):
    """A recorder whose thread is a job of its process, which starts when operations wait.

    Attributes:
        num_put: Number of operations of the core since the recording began.
        reason: Why the recording has ended.
    """

    def _start(self) -> None:
        self.num_put, self._is_writing = 0, False
        self.reason: str | None = None
        self._node = cast(Node, CLOCK.get())

    def put(self, make: Callable[[], Any]) -> None:
        self.num_put += 1
        super().put(make)
        if not self._is_writing and self._is_open:
            self._is_writing = True
            self._node.run_job(self.flush)

    def flush(self) -> None:
        self._is_writing = False
        if not self._pending.empty():
            self._write_pending()

    def close(self) -> None:
        self.flush()
        self._writer.close()

    def _end(self, reason: str) -> None:
        if self._is_open:
            self.reason = reason
            self._node._world.note("recording ends", self._node.host)
        super()._end(reason)


class _Compaction:
    """The process that replaces files by a snapshot. It outlives the scheduler that started it."""

    def __init__(self, command: list[Any], **_: Any) -> None:
        self._path, self._end = Path(command[-2]), int(command[-1])
        self._disk = _DISKS[self._path.parent]
        self._outage, self._error = self._disk.num_outages, ""
        self.returncode: int | None = None
        self._header = files.read_header(self._path)
        self._disk.world.after(self._disk.chance.uniform(0, _COMPACTS_S), self._run)

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
"""Disks by folder: code outside of the processes of a world has no other name for them."""


@contextmanager
def simulated_disks(
    disks: Callable[[], Mapping[str, Disk]], make: Callable[[SchedulerConfig, Recorder], Any]
) -> Iterator[None]:
    """Inside the block, recordings are on these disks, by host; `make` makes the recorded cores."""

    def open_recorder(path: str, *, with_token_ids: bool, max_bytes: int) -> Recorder | None:
        # Settings do not allow files as small as a world's.
        disk = _DISKS[Path(path).parent]
        found = disk.recorder = SimRecorder.open(path, with_token_ids=with_token_ids, max_bytes=disk.max_bytes)
        return found

    def make_scheduler(self: SimRecorder, config: SchedulerConfig) -> Any:
        return make(config, self)

    with ExitStack() as stack:
        for target, name, value in (
            (files, "open_file", _File),
            (files, "sync", lambda file: file.disk.sync(file)),
            (replay, "sync", lambda file: file.disk.sync(file)),
            # The cores of worlds check themselves, which computes hashes that plans then need not look up.
            (replay, "Replayer", lambda **_: Replayer()),
            (recorder, "subprocess", SimpleNamespace(Popen=_Compaction, DEVNULL=None, PIPE=None)),
            (SimRecorder, "make_scheduler", make_scheduler),
            (replica, "Recorder", SimpleNamespace(open=open_recorder)),
            (step_loop, "StepTrace", SimpleNamespace(open=_open_trace)),
        ):
            stack.enter_context(patch.object(target, name, value))
        try:
            yield
        finally:
            for disk in disks().values():
                disk.close()
