"""Records the inputs of the core (`--record`). The core waits for nothing: a thread makes and writes the messages.

A recording never harms the scheduler: if it cannot continue, as on a full disk, it ends with one line in the log.
"""

import errno
import logging
import os
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeVar, cast

import numpy as np

from quire.messages.arrays import encode_int32
from quire.messages.prefix_hashes import BlockHash, PrefixHash, in_group
from quire.rpc.process import command_of, environ_of
from quire.runtime import entropy
from quire.runtime.settings import ConfigurationError
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.pins import Pin
from scheduler_svc.core.prefix_index import PrefixHashes
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import Adapter, ClientId, cache_root
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestFailure, StepPlan, StepResult
from scheduler_svc.recording import files, messages
from scheduler_svc.recording.messages import Header, Operation, TokenHider

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_MAX_PENDING = 50_000
"""Maximum operations that wait to be written; a slower disk ends the recording."""

_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_SEGMENTS = 4
"""A recording continues in another file at this part of its maximum size. There are at most three files and the
snapshot: the newest file, the one before, and one that is being replaced by the snapshot."""


class Recorder:
    """A recording that is being written. `open` begins it; the cores from `make_scheduler` are recorded."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, max_bytes: int) -> None:
        self._hider = None if header.has_token_ids else TokenHider(entropy.random_bytes(TokenHider.KEY_BYTES))
        self._pending: queue.SimpleQueue[Callable[[], Operation] | None] = queue.SimpleQueue()
        self._is_open = True
        self._writer = _Writer(path, file, header, max_bytes)
        self._thread = threading.Thread(target=self._write, name="recording", daemon=True)
        self._start()

    def _start(self) -> None:
        """Starts the thread that writes operations. A simulation writes them itself."""
        self._thread.start()

    @classmethod
    def open(cls, path: str, *, with_token_ids: bool, max_bytes: int) -> Self | None:
        """Sets an earlier recording of this name aside and begins a new one. Returns None if the disk is full or fails,
        which must not keep a scheduler from restarting. Raises ConfigurationError for other write errors."""
        header = files.new_header(has_token_ids=with_token_ids)
        files.set_aside(Path(path))
        try:
            return cls(Path(path), files.create(Path(path), header), header, max_bytes)
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise ConfigurationError(f"--record {path}: {error.strerror}") from error
            _logger.warning("nothing is recorded in %s: %s", path, error.strerror)
            return None

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return cast(Scheduler, RecordedScheduler(Scheduler(config), self.put, self._hider))

    def put(self, make: Callable[[], Operation]) -> None:
        """Writes the operation that `make` returns. `make` must not read data that may change."""
        if not self._is_open:
            return
        if self._pending.qsize() >= _MAX_PENDING:
            self._end(f"{_MAX_PENDING} operations wait to be written: the disk is too slow")
            return
        self._pending.put(make)

    def close(self) -> None:
        """Returns when all is written. May be called again."""
        self._pending.put(None)
        self._thread.join()
        self._writer.close()

    def _end(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            _logger.warning("the recording %s ends here: %s", self._writer.path, reason)

    def _write(self) -> None:
        while self._write_pending():
            pass

    def _write_pending(self) -> bool:
        """Writes pending operations, or waits for the next one. Returns whether more may come."""
        pending = [self._pending.get()]
        # Operations that came meanwhile go into the same write.
        while not self._pending.empty():
            pending.append(self._pending.get())
        if self._is_open:
            self._write_all([make for make in pending if make is not None])
        return pending[-1] is not None

    def _write_all(self, makes: Sequence[Callable[[], Operation]]) -> None:
        try:
            self._writer.write([make().SerializeToString() for make in makes])
        except (OSError, files.RecordingError) as error:
            self._end(str(error))
        except Exception as error:
            _logger.exception("an operation of the core cannot be recorded")
            self._end(f"{type(error).__name__}: {error}")


class _Writer:
    """Appends operations to the newest file, and begins another file when it is full."""

    def __init__(self, path: Path, file: BinaryIO, header: Header, max_bytes: int) -> None:
        self.path = path
        self._file = file
        self._header = header
        self._max_segment = max_bytes // _SEGMENTS
        self._num_bytes = 0
        self._compacting: subprocess.Popen[str] | None = None

    def write(self, operations: Iterable[bytes]) -> None:
        """Raises OSError, or RecordingError if too much of the recording is still to be replaced by a snapshot."""
        pending = bytearray()
        for operation in operations:
            pending += files.frame(operation)
            # A file ends when it is full, however many operations came at once.
            if self._num_bytes + len(pending) >= self._max_segment:
                self._append(pending)
                pending = bytearray()
                self._go_on()
        self._append(pending)

    def _append(self, frames: bytearray) -> None:
        self._num_bytes += len(frames)
        files.append(self._file, frames)

    def close(self) -> None:
        self._file.close()
        if self._compacting is not None:
            self._compacting.kill()
            self._compacting.communicate()

    def _go_on(self) -> None:
        segment = self._header.segment
        if self._compacting is not None:
            if self._compacting.poll() is None:
                if self._num_bytes < 2 * self._max_segment:
                    return
                raise files.RecordingError("its oldest file is not yet replaced by a snapshot, and it may not grow")
            _, errors = self._compacting.communicate()
            if self._compacting.returncode:
                raise files.RecordingError(errors.strip().rpartition("\n")[2])
            self._compacting = None
        header = files.header_of(self._header, segment + 1)
        file = files.go_on(self.path, header)
        self._file.close()
        self._file, self._header = file, header
        self._num_bytes = 0
        if segment:
            # In a separate process, since running the core takes the processor from this one.
            self._compacting = subprocess.Popen(
                [*command_of("scheduler_svc.recording.replay"), self.path, str(segment)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environ_of(os.environ, OPENBLAS_NUM_THREADS="1"),
            )


class RecordedScheduler:
    """Records the calls of a core from outside. All else is read from the core itself.

    Attributes:
        restored: Blocks that a worker still held when it was attached, and whose tokens the core does not know yet;
            empty unless token ids are hidden. They are recorded under separate names. Once the core computes the hash
            of one, its tokens are known, and the recording gives their hidden tokens.
    """

    def __init__(
        self, core: Scheduler, put: Callable[[Callable[[], Operation]], None], hider: TokenHider | None
    ) -> None:
        self._core = core
        self._put = put
        self._hider = hider
        self.restored: set[BlockHash] = set()
        if hider is not None:
            core.arrivals.observe = self._observe
        self.submit = self._recorded(core.submit, partial(messages.submit_message, hider=hider))
        for name, values in messages.CALLS.items():
            message = messages.MESSAGE_OF_CALL.get(name, name)
            setattr(self, name, self._recorded(getattr(core, name), partial(_message, message, values)))
        put(partial(messages.start_message, core.config))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def _recorded(self, call: Callable[..., T], message: Callable[..., Operation]) -> Callable[..., T]:
        """A call that is recorded as the message of its arguments."""

        def recorded(*args: Any, **kwargs: Any) -> T:
            return self._record(partial(call, *args, **kwargs), lambda _: message(*args, **kwargs))

        return recorded

    def _record(self, call: Callable[[], T], describe: Callable[[T | None], Operation]) -> T:
        """Calls `call`, and records it. `describe` gets the call's result, None if it raised, and runs later."""
        outcome, raised = None, ""
        try:
            outcome = call()
            return outcome
        except Exception as error:
            raised = type(error).__name__
            raise
        finally:
            self._put(partial(_describe, describe, outcome, raised))

    def pin(
        self, tenant: str, token_ids: list[int], now: float, time_to_live: float, adapter: Adapter | None = None
    ) -> Pin:
        hider, block_size = self._hider, self._core.config.block_size
        if self.restored:
            hashes = _ObservedHashes(cache_root(tenant, adapter), block_size, self)
            hashes.first(len(token_ids) // block_size, token_ids)
        return self._record(
            lambda: self._core.pin(tenant, token_ids, now, time_to_live, adapter),
            lambda _: messages.call_message(
                "pin",
                now,
                tenant=tenant,
                token_ids=encode_int32(messages.hidden(hider, token_ids)),
                time_to_live_seconds=time_to_live,
                adapter_digest=messages.digest_of(adapter),
            ),
        )

    def unpin(self, tenant: str, pin_id: str) -> bool:
        pin = self._core.pins.of_tenant(tenant, pin_id)
        if pin is None:
            return False
        handle = pin.key.handle
        return self._record(
            lambda: self._core.unpin(tenant, pin_id), lambda _: messages.call_message("unpin", handle=handle)
        )

    def schedule(self, now: float) -> StepPlan | None:
        return self._record(lambda: self._core.schedule(now), partial(messages.plan_message, now=now))

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        in_flight, table, hider = self._core.in_flight, self._core.batch.rows, self._hider
        rows = in_flight[0].rows if in_flight else np.zeros(0, np.int64)
        known, sequences = table.num_known[rows], [table.sequences[row] for row in rows.tolist()]

        def describe(_: object) -> Operation:
            recorded = result if hider is None else hider.hide_result(result, rows, known, sequences)
            return messages.apply_message(recorded, now)

        return self._record(lambda: self._core.apply(result, now), describe)

    def take_preparations(self) -> list[Preparation]:
        if not self._core.preparations.has_wanted:
            return []
        return self._record(self._core.take_preparations, lambda _: messages.call_message("take_preparations"))

    def restore_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        blocks = list(sealed)
        self._record(
            lambda: self._core.restore_sealed(blocks),
            lambda _: messages.call_message(
                "restore_sealed",
                blocks=encode_int32([block for block, _ in blocks]),
                hashes=self._names(content for _, content in blocks),
            ),
        )
        self.restored.clear()
        self._expect(content for _, content in blocks)

    def _names(self, hashes: Iterable[BlockHash]) -> bytes:
        return b"".join(hashes if self._hider is None else map(self._hider.name_of, hashes))

    def tier_changed(self, slots: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        self._record(
            lambda: self._core.tier_changed(slots, hashes),
            lambda _: messages.call_message("tier_changed", slots=encode_int32(slots), hashes=self._names(hashes)),
        )
        self._expect(hashes)

    def _expect(self, hashes: Iterable[BlockHash]) -> None:
        """Remembers names of blocks that came from outside, and forgets blocks that are gone, once they may outnumber
        the blocks that exist."""
        if self._hider is None:
            return
        core, config = self._core, self._core.config
        self.restored.update(hashes)
        for group in core.groups():
            for sequence in group.unfinished:
                assert isinstance(sequence.prefix_hashes, _ObservedHashes)
                sequence.prefix_hashes.report(0, sequence.token_ids)
        if len(self.restored) > 2 * (len(core.tier) + config.num_blocks + config.num_host_blocks) + 64:
            self.restored = set(filter(self._has, self.restored))

    def _has(self, content: BlockHash) -> bool:
        """Whether a block with this name is anywhere."""
        pools = self._core.batch.blocks.pool, self._core.batch.blocks.host.pool
        return content in self._core.tier or any(pool.hits([content]) for pool in pools)

    @property
    def num_groups(self) -> int:
        return self._core.config.layout.num_groups + self._core.config.state_blocks

    def rename(self, prefix: PrefixHash, hashes: messages.HiddenHashes, index: int, group: int) -> None:
        """Records that a restored block of a group of layers is number `index` of a sequence whose hidden
        tokens have these hashes."""
        hider, name = self._hider, in_group(prefix, group)
        assert hider is not None
        self.restored.discard(name)
        self._put(
            lambda: messages.call_message(
                "rename", name=hider.name_of(name), hash=in_group(hashes.of(index, hider), group)
            )
        )

    def refit(self, config: SchedulerConfig, now: float) -> list[RequestFailure]:
        # Recordings show it as the start of another core, which takes over from this one.
        self._put(partial(messages.start_message, config))
        failures = self._record(
            partial(self._core.refit, config, now), lambda _: messages.call_message("take_over", now)
        )
        for group in self._core.groups():
            self._observe(group)
        return failures

    def _observe(self, group: SequenceGroup) -> None:
        """Follows the hashes of a new group, which matter only where token ids are hidden."""
        if self._hider is not None:
            block_size = self._core.config.block_size
            for sequence in group.sequences:
                sequence.prefix_hashes = _ObservedHashes(group.request.cache_root, block_size, self)


def _message(name: str, values: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> Operation:
    return messages.call_message(name, **values(*args, **kwargs))


def _describe(describe: Callable[[T | None], Operation], outcome: T | None, raised: str) -> Operation:
    operation = describe(outcome)
    operation.raised = raised
    return operation


class _ObservedHashes(PrefixHashes):
    """Hashes of a sequence's blocks that report the hashes of restored blocks."""

    def __init__(self, root: PrefixHash, block_size: int, recorder: RecordedScheduler) -> None:
        super().__init__(root, block_size)
        self._root = root
        self._recorder = recorder
        # Hidden hashes of the blocks up to the last reported one; forks share them.
        self._hidden: messages.HiddenHashes | None = None

    def _compute(self, count: int, token_ids: Sequence[int]) -> None:
        known = len(self._hashes)
        super()._compute(count, token_ids)
        self.report(known, token_ids)

    def report(self, start: int, token_ids: Sequence[int]) -> None:
        """Reports the restored blocks whose tokens are known now, from the hash number `start` on."""
        restored, size = self._recorder.restored, self.block_size
        found = [
            (index, group)
            for index in range(start, len(self._hashes))
            for group in range(self._recorder.num_groups)
            if in_group(self._hashes[index], group) in restored
        ]
        if not found:
            return
        num_hidden = 0 if self._hidden is None else self._hidden.end
        if num_hidden <= (last := found[-1][0]):
            tokens = list(token_ids[num_hidden * size : (last + 1) * size])
            self._hidden = messages.HiddenHashes(self._root, size, self._hidden, tokens)
        assert self._hidden is not None
        for index, group in found:
            self._recorder.rename(self._hashes[index], self._hidden, index, group)

    def copy(self) -> PrefixHashes:
        twin = _ObservedHashes(self._root, self.block_size, self._recorder)
        twin._hashes, twin._parent, twin._hidden = list(self._hashes), self._parent, self._hidden
        return twin
