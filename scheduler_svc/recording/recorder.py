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
from typing import BinaryIO, Self, TypeVar

import numpy as np

from quire import entropy
from quire.rpc.process import command_of, environ_of
from quire.settings import ConfigurationError
from scheduler_svc.core.block_pool import BlockHash, BlockId, PrefixHashes
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.moves import Lease
from scheduler_svc.core.pins import Pin
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import Adapter, ClientId, Request, RequestKey, cache_root
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestFailure, StepInFlight, StepPlan, StepResult
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
        return _RecordedScheduler(config, self.put, self._hider)

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
                [*command_of("scheduler_svc.recording.compact"), self.path, str(segment)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=environ_of(os.environ, OPENBLAS_NUM_THREADS="1"),
            )


class _RecordedScheduler(Scheduler):
    """A core that reports calls from outside; its own calls of itself follow from them."""

    def __init__(
        self, config: SchedulerConfig, put: Callable[[Callable[[], Operation]], None], hider: TokenHider | None
    ) -> None:
        super().__init__(config)
        self._put = put
        self._hider = hider
        self._is_told = False
        self._stops = _StopTable()
        self._restored = None if hider is None else _Restored(put, hider)
        put(partial(messages.start_message, config))

    def _tell(self, call: Callable[[], T], describe: Callable[[T | None], Operation]) -> T:
        """Calls, and reports. `describe` gets the call's result, None if it raised, and runs later."""
        if self._is_told:
            return call()
        self._is_told = True
        outcome, raised = None, ""
        try:
            outcome = call()
            return outcome
        except Exception as error:
            raised = type(error).__name__
            raise
        finally:
            self._is_told = False
            self._put(partial(_describe, describe, outcome, raised))

    def submit(self, request: Request, now: float) -> None:
        self._stops.add(request.stop_token_ids)
        hider = self._hider
        self._tell(
            lambda: super(_RecordedScheduler, self).submit(request, now),
            lambda _: messages.submit_message(request, now, hider),
        )

    def abort(self, key: RequestKey) -> bool:
        return self._tell(lambda: super(_RecordedScheduler, self).abort(key), lambda _: messages.abort_message(key))

    def abort_sequence(self, key: RequestKey, index: int) -> bool:
        return self._tell(
            lambda: super(_RecordedScheduler, self).abort_sequence(key, index),
            lambda _: messages.abort_sequence_message(key, index),
        )

    def pin(
        self,
        tenant: str,
        token_ids: list[int],
        now: float,
        time_to_live: float,
        adapter: Adapter | None = None,
        *,
        accepted_before: bool = False,
    ) -> Pin:
        hider = self._hider
        if self._restored is not None and self._restored.hashes and not self._is_told:
            num_blocks = len(token_ids) // self.config.block_size
            _ObservedHashes(cache_root(tenant, adapter), self.config.block_size, self._restored).first(
                num_blocks, token_ids
            )
        pin = partial(super().pin, tenant, token_ids, now, time_to_live, adapter, accepted_before=accepted_before)
        return self._tell(
            pin,
            lambda _: messages.pin_message(tenant, token_ids, now, time_to_live, adapter, hider),
        )

    def unpin(self, tenant: str, pin_id: str) -> bool:
        pin = self.pins.of_tenant(tenant, pin_id)
        if pin is None:
            return False
        return self._tell(
            lambda: super(_RecordedScheduler, self).unpin(tenant, pin_id),
            lambda _: messages.unpin_message(pin.key.handle),
        )

    def forget_cached(self) -> int:
        return self._tell(super().forget_cached, lambda _: messages.forget_cached_message())

    def expire_pins(self, now: float) -> None:
        self._tell(
            lambda: super(_RecordedScheduler, self).expire_pins(now), lambda _: messages.expire_pins_message(now)
        )

    def schedule(self, now: float) -> StepPlan | None:
        return self._tell(
            lambda: super(_RecordedScheduler, self).schedule(now), partial(messages.plan_message, now=now)
        )

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        step = self.in_flight[0] if self.in_flight else None
        stops = {} if step is None or self._hider is None else self._stops_of(step, result)
        known = np.zeros(0, np.int64) if step is None else self.batch.rows.num_known[step.rows]
        hider = self._hider
        return self._tell(
            lambda: super(_RecordedScheduler, self).apply(result, now),
            lambda _: messages.apply_message(step, known, result, now, hider, stops),
        )

    def prepared(
        self, number: int, failure: str | None = None, failed: frozenset[int] = frozenset()
    ) -> dict[ClientId, ClientEvents]:
        return self._tell(
            lambda: super(_RecordedScheduler, self).prepared(number, failure, failed),
            lambda _: messages.prepared_message(number, failure, failed),
        )

    def hand_over(
        self, key: RequestKey, lease: Lease, now: float, lease_s: float
    ) -> list[tuple[BlockId, BlockHash]] | None:
        return self._tell(
            lambda: super(_RecordedScheduler, self).hand_over(key, lease, now, lease_s),
            lambda _: messages.hand_over_message(key, lease, now, lease_s),
        )

    def hold_new(self, now: float, seconds: float) -> None:
        self._tell(
            lambda: super(_RecordedScheduler, self).hold_new(now, seconds),
            lambda _: messages.hold_new_message(now, seconds),
        )

    def renew_lease(self, lease: Lease, now: float, lease_s: float) -> None:
        self._tell(
            lambda: super(_RecordedScheduler, self).renew_lease(lease, now, lease_s),
            lambda _: messages.renew_lease_message(lease, now, lease_s),
        )

    def give_up_preparation(self, number: int, seconds: float) -> dict[ClientId, ClientEvents]:
        return self._tell(
            lambda: super(_RecordedScheduler, self).give_up_preparation(number, seconds),
            lambda _: messages.give_up_preparation_message(number),
        )

    def take_preparations(self) -> list[Preparation]:
        if not self.preparations.has_wanted:
            return []
        return self._tell(super().take_preparations, lambda _: messages.take_preparations_message())

    def refuse_in_flight(self, detail: str) -> dict[ClientId, ClientEvents]:
        return self._tell(
            lambda: super(_RecordedScheduler, self).refuse_in_flight(detail),
            lambda _: messages.refuse_message(detail),
        )

    def lose_in_flight(self, detail: str | None = None) -> None:
        self._tell(
            lambda: super(_RecordedScheduler, self).lose_in_flight(detail), lambda _: messages.lose_message(detail)
        )

    def judge_loss(self, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        return self._tell(
            lambda: super(_RecordedScheduler, self).judge_loss(was_alive=was_alive),
            lambda _: messages.judge_message(was_alive),
        )

    def void_in_flight(self, now: float) -> None:
        self._tell(lambda: super(_RecordedScheduler, self).void_in_flight(now), lambda _: messages.void_message(now))

    def restore_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        blocks, hider = list(sealed), self._hider
        self._tell(
            lambda: super(_RecordedScheduler, self).restore_sealed(blocks),
            lambda _: messages.sealed_message(blocks, hider),
        )
        if self._restored is not None:
            self._restored.hashes.clear()
            self._expect(content for _, content in blocks)

    def tier_changed(self, slots: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        hider = self._hider
        self._tell(
            lambda: super(_RecordedScheduler, self).tier_changed(slots, hashes),
            lambda _: messages.tier_message(slots, hashes, hider),
        )
        self._expect(hashes)

    def _expect(self, hashes: Iterable[BlockHash]) -> None:
        """Remembers names of blocks that came from outside."""
        if self._restored is not None:
            self._restored.hashes.update(hashes)
            for group in self.groups():
                for sequence in group.unfinished:
                    assert isinstance(sequence.prefix_hashes, _ObservedHashes)
                    sequence.prefix_hashes.report(0, sequence.token_ids)
            self._restored.keep_some(self._has, len(self.tier) + self.config.num_blocks + self.config.num_host_blocks)

    def _has(self, content: BlockHash) -> bool:
        """Whether a block with this name is anywhere."""
        pools = self.batch.blocks.pool, self.swap_space.pool
        return content in self.tier or any(pool.hits([content]) for pool in pools)

    def refit(self, config: SchedulerConfig, now: float) -> list[RequestFailure]:
        # Recordings show it as the start of another core, which takes over from this one.
        self._put(partial(messages.start_message, config))
        failures = self._tell(
            lambda: super(_RecordedScheduler, self).refit(config, now), lambda _: messages.take_over_message(now)
        )
        for group in self.groups():
            self._observe(group)
        return failures

    def _arrive(self, request: Request, now: float) -> SequenceGroup:
        group = super()._arrive(request, now)
        self._observe(group)
        return group

    def _observe(self, group: SequenceGroup) -> None:
        if self._restored is not None:
            for sequence in group.sequences:
                sequence.prefix_hashes = _ObservedHashes(
                    group.request.cache_root, self.config.block_size, self._restored
                )

    def _stops_of(self, step: StepInFlight, result: StepResult) -> dict[int, frozenset[int]]:
        """The stop tokens of the rows whose result may hold one."""
        rows = list(result.candidates)
        token_rows = messages.token_rows(step, result)
        if token_rows is not None:
            rows += token_rows[self._stops.holds(result.token_ids)].tolist()
        sequences = self.batch.rows.sequences_in(np.array(rows, np.int64))
        return {row: each.request.stop_token_ids for row, each in zip(rows, sequences, strict=True) if each is not None}


def _describe(describe: Callable[[T | None], Operation], outcome: T | None, raised: str) -> Operation:
    operation = describe(outcome)
    operation.raised = raised
    return operation


class _StopTable:
    """The token ids that end any sequence."""

    _MAX_ID = 1 << 22

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._is_stop = np.zeros(1, dtype=bool)

    def add(self, token_ids: frozenset[int]) -> None:
        new = [each for each in token_ids - self._known if 0 <= each < self._MAX_ID]
        if not new:
            return
        self._known.update(new)
        if max(new) + 1 >= len(self._is_stop):
            # One more entry, which stays False, stands for all larger ids.
            self._is_stop = np.resize(self._is_stop, max(new) + 2)
        self._is_stop[:] = False
        self._is_stop[list(self._known)] = True

    def holds(self, token_ids: messages.Array) -> messages.Array:
        return self._is_stop[np.clip(token_ids, 0, len(self._is_stop) - 1)]


class _ObservedHashes(PrefixHashes):
    """Hashes of a sequence's blocks that report the hashes of restored blocks."""

    def __init__(self, root: BlockHash, block_size: int, restored: "_Restored") -> None:
        super().__init__(root, block_size)
        self._root = root
        self._restored = restored
        # Hidden hashes of the blocks up to the last reported one; forks share them.
        self._hidden: messages.HiddenHashes | None = None

    def _compute(self, count: int, token_ids: Sequence[int]) -> None:
        known = len(self._hashes)
        super()._compute(count, token_ids)
        self.report(known, token_ids)

    def report(self, start: int, token_ids: Sequence[int]) -> None:
        """Reports the restored blocks whose tokens are known now, from the hash number `start` on."""
        restored, size = self._restored.hashes, self._block_size
        found = [index for index in range(start, len(self._hashes)) if self._hashes[index] in restored]
        if not found:
            return
        num_hidden = 0 if self._hidden is None else self._hidden.end
        if num_hidden <= found[-1]:
            tokens = list(token_ids[num_hidden * size : (found[-1] + 1) * size])
            self._hidden = messages.HiddenHashes(self._root, size, self._hidden, tokens)
        assert self._hidden is not None
        for index in found:
            self._restored.found(self._hashes[index], self._hidden, index)

    def copy(self) -> PrefixHashes:
        twin = _ObservedHashes(self._root, self._block_size, self._restored)
        twin._hashes, twin._parent, twin._hidden = list(self._hashes), self._parent, self._hidden
        return twin


class _Restored:
    """Blocks that a worker still held when it was attached, and whose tokens the core does not know yet.

    They are recorded under separate names. Once the core computes the hash of one, its tokens are known, and the
    recording gives their hidden tokens.
    """

    def __init__(self, put: Callable[[Callable[[], Operation]], None], hider: TokenHider) -> None:
        self.hashes: set[BlockHash] = set()
        self._put = put
        self._hider = hider

    def keep_some(self, has: Callable[[BlockHash], bool], max_blocks: int) -> None:
        """Forgets blocks that are gone, once they may outnumber the blocks that exist, at most `max_blocks`."""
        if len(self.hashes) > 2 * max_blocks + 64:
            self.hashes = set(filter(has, self.hashes))

    def found(self, content: BlockHash, hashes: messages.HiddenHashes, index: int) -> None:
        """Reports that a restored block is number `index` of a sequence with these hashes."""
        self.hashes.discard(content)
        self._put(partial(messages.rename_message, content, hashes, index, self._hider))
