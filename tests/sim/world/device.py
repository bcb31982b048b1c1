"""A worker's device in a world: steps take virtual time, and tokens depend on all that a step reads.

Keys and values are hashes of all tokens up to their slot. The output of a row is a function of every slot that it reads
through its block table (`model`), so one block that is wrong, stale or early changes a token.
"""

import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from quire.common.v1 import common_pb2
from quire.messages.layer_groups import LayerGroups
from quire.model_files.adapter_files import UnusableAdapterError
from tests.sim.world.model import Draw, candidates, line_of, mixed, mixed_prefixes, next_token
from tests.sim.world.ranks import Group, Place, Undecided, worker_of
from tests.sim.world.traffic import NUM_SPECIAL_TOKENS
from tests.sim.world.watch import CheckedSeals, Names
from tests.sim.world.world import KilledError, Node, World
from tests.support.fake_pool import BlockError, FakePool, ForeignBlockError, Prefixes
from tests.support.fake_rows import spans
from tests.support.fake_runner import FakeRunner, FakeStep
from tests.support.logprobs import Line, columns_of
from worker_svc.device.device_loop import DeviceLoop, JobThread, RunningStep
from worker_svc.step import (
    AdmittedStep,
    Batch,
    PromptLogprobs,
    RowCandidates,
    StepOutput,
    StepTimings,
    TokenLogprobs,
)

T = TypeVar("T")

_NOT_FINITE = -1
"""Slot value that stands for a non-finite number, as all below 0. Hashes are never below 0, in no group."""
_LOAD_S = 0.05
"""Seconds to load an adapter."""
_SLOW_S, _NEVER_S = 7.0, 1e6
"""Both are longer than a scheduler waits for a constraint or an adapter."""
_STEP_S, _TOKEN_S = 0.002, 0.000_02


class _ReadablePool(FakePool):
    """A pool that lets callers read the contents of its blocks."""

    @property
    def slots(self) -> np.ndarray:
        """[number of blocks, block size] int64."""
        return self._gpu

    @property
    def host_slots(self) -> np.ndarray:
        """The slots of the blocks in host memory, in the same shape."""
        return self._host

    def keep(self, slots: np.ndarray) -> None:
        """Takes over the slots that an earlier worker left behind."""
        self._gpu = slots

    def release(self) -> None:
        """Returns its memory to the system: it holds zeros when it is used again."""
        self._gpu[:], self._host[:] = 0, 0

    @property
    def is_released(self) -> bool:
        """Whether nothing was written since the last release, or ever."""
        return not (self._gpu.any() or self._host.any())

    def spoil(self, blocks: Sequence[int], start: int, end: int) -> None:
        """Makes the computed values of these slots non-finite."""
        for places in self._places(blocks, start, end):
            self._gpu[places] = _NOT_FINITE

    def spoil_whole(self, blocks: Sequence[int]) -> None:
        """Makes all values in these blocks non-finite."""
        self._gpu[list(blocks)] = _NOT_FINITE

    def check_read(self, row: int, blocks: Sequence[int], prefixes: Prefixes, end: int) -> None:
        """Checks as any pool does, but lets non-finite values pass: the row that samples from them finds them."""
        try:
            super().check_read(row, blocks, prefixes, end)
        except ForeignBlockError:
            if _is_finite(self.read(blocks, prefixes, end, end)):
                raise


def _is_finite(content: np.ndarray) -> bool:
    """Whether all slots hold finite numbers."""
    return not np.count_nonzero(content < 0)


@dataclass(frozen=True, slots=True)
class HeldPool:
    """A pool that outlives its worker: the slots of its blocks, the flags and hashes of sealed blocks, and the
    namespace that gives them their meaning."""

    slots: np.ndarray
    sealed: np.ndarray
    hashes: np.ndarray
    namespace: tuple[object, ...]


class HashRunner(FakeRunner):
    """A runner whose rows draw tokens from the contents of their blocks. Its pool is empty at first, or taken over."""

    # The device loop launches a step when it gets it, and its output is available when its time is over.
    is_asynchronous = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        *,
        num_host_blocks: int,
        names: Names,
        groups: LayerGroups,
        rank: int = 0,
        group: Group | None = None,
    ) -> None:
        super().__init__(num_blocks, block_size, vocab_size, num_host_blocks=num_host_blocks, groups=groups)
        self._seals = self.checked_seals = CheckedSeals(num_blocks, names)
        self._pool = self._readable = _ReadablePool(num_blocks, num_host_blocks, block_size, groups)
        self.on_block_error: Callable[[BlockError], object] = lambda _: None
        self.takes_glitch: Callable[[Place, bool], bool] = lambda *_: False
        """Whether a row of this step gets non-finite values; the flag says if it has chunks that do not sample."""
        self.takes_deviation: Callable[[], int] = lambda: 0
        """Nonzero if this rank draws another token than the others."""
        self.num_spoiled = 0
        self.model = 0
        self.deadly: Mapping[int, int] = {}
        """By the seed of a sequence, the position of the token whose computation kills the process."""
        self.deadly_need: str | None = None
        """The pattern of a constraint whose compilation kills the process."""
        self.on_deadly = lambda: None
        self.rank, self.group = rank, group
        self.num_computed_tokens = 0
        self._place = (0, 0)

    def keep(self, held: HeldPool) -> None:
        """Takes over the pool of an earlier worker."""
        self._readable.keep(held.slots)
        self.checked_seals.keep(held.sealed, held.hashes)
        self.checked_seals.check(held.slots)

    def held(self, namespace: tuple[object, ...]) -> HeldPool:
        return HeldPool(self._readable.slots, *self.checked_seals.memory, namespace)

    def release_memory(self) -> None:
        super().release_memory()
        self._readable.release()

    @property
    def has_contents(self) -> bool:
        """Whether any block has contents."""
        return not self._readable.is_released

    def ends_on_host(self, block: int) -> tuple[int, int]:
        """The contents of the first and the last slot of a host block."""
        slots = self._readable.host_slots[block]
        return int(slots[0]), int(slots[-1])

    def tear(self, admitted: AdmittedStep) -> None:
        """Marks some slots of a step as torn: the process is killed in the middle of it."""
        self._readable.slots[admitted.written_blocks, ::2] = _NOT_FINITE

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> FakeStep:
        self._place = admitted.step.scheduler_epoch, admitted.step.step_id
        if self.group is not None:
            self.group.agree(self.rank, *self._place)
        done = super().launch(admitted, queue_us)
        try:
            self.checked_seals.check(self._readable.slots)
        except BlockError as error:
            self.on_block_error(error)
            raise
        if self.group is not None:
            self.group.compare(self._place, self._told(admitted.step.batch, done.output))
        return done

    def _told(self, batch: Batch, output: StepOutput) -> object:
        """Data that must be equal at all ranks: the blocks of rows, the contents that they read, and the tokens."""
        tables = [(row, tuple(self._rows[row].blocks)) for row in batch.rows.tolist()]
        read = [self._read(*each).tobytes() for each in spans(batch)]
        return tables, read, output.token_ids.tolist()

    def _read(self, row: int, start: int, end: int) -> np.ndarray:
        """The slots that a row reads for its tokens from `start` to `end`. In place of the last one comes its state, if
        that is the one behind them and another one than it should be."""
        own = self._rows[row]
        content = self._readable.read(own.blocks, own.prefixes, start, end)
        if own.state_blocks and end == own.num_computed:
            state = self._readable.read_state(own.state_blocks, end, own.prefixes)
            if state != own.prefixes.hashes(end - 1, end)[0]:
                content[-1] = state
        return content

    def _compute(self, batch: Batch) -> None:
        self.num_computed_tokens += int(batch.num_new_tokens.sum())
        for row, start, end in spans(batch):
            sampling = self._rows[row].sampling
            pattern = sampling.constraint and sampling.constraint.message.regex
            if start <= self.deadly.get(sampling.seed, -1) < end or (pattern and pattern == self.deadly_need):
                self.on_deadly()
                raise KilledError
        try:
            super()._compute(batch)
        except BlockError as error:
            # A scheduler that tries again would hide the error.
            self.on_block_error(error)
            raise
        sources = set(batch.samples[:, 1].tolist())
        chunks = [place for place, row in enumerate(batch.rows.tolist()) if row not in sources]
        if len(batch.rows) and self.takes_glitch(self._place, len(chunks) > 0):
            # Each of several ranks has a part of the row; only the first one counts it.
            self.num_spoiled += self.rank == 0
            place = chunks[0] if chunks else 0
            row, start, end = (int(column[place]) for column in (batch.rows, batch.num_computed_tokens, batch.ends))
            spoiled = self._rows[row]
            self._readable.spoil(spoiled.blocks, start, end)
            copies = [block for blocks in spoiled.checkpoints.values() for block in blocks]
            self._readable.spoil_whole([*spoiled.state_blocks, *copies])

    def _end_of_drafts(self, row: int) -> int:
        # Drafts end before the deadly token, or the request would die at a different step when it is tried by itself.
        return self.deadly.get(self._rows[row].sampling.seed, sys.maxsize)

    def _failing_chunks(self, batch: Batch) -> tuple[int, ...]:
        sampling = set(batch.samples[:, 1].tolist())
        chunks = [each for each in spans(batch) if each[0] not in sampling]
        return tuple(row for row, start, end in chunks if not _is_finite(self._read(row, start, end)))

    def _sample(self, step_id: int, batch: Batch) -> StepOutput:
        computed = {row: (start, end) for row, start, end in spans(batch)}
        token_ids = np.zeros(len(batch.samples), np.int32)
        searching: list[RowCandidates] = []
        lines: dict[int, Line] = {}
        failed: list[int] = []
        for place, (row, source) in enumerate(batch.samples.tolist()):
            (start, end), state = computed[source], self._rows[row]
            sampling = state.sampling
            content = self._read(source, start, end)
            if not _is_finite(content):
                failed.append(row)
                if sampling.num_candidates is None:
                    # The next step may compute the token of this row already.
                    state.prefixes.append(0)
                continue
            mix = mixed(content, self.model)
            pattern = "" if sampling.constraint is None else sampling.constraint.message.regex
            if sampling.num_candidates is not None:
                best, logprobs = candidates(mix, sampling.num_candidates, pattern)
                searching.append(RowCandidates(row, np.array(best, np.int32), np.array(logprobs, np.float32)))
                continue
            rules, banned = sampling.rules, frozenset[int]()
            if rules is not None and end - state.num_prompt_tokens < rules.min_tokens:
                banned = frozenset(rules.stop_token_ids.tolist())
            draw = Draw(sampling.parameters.temperature, sampling.parameters.top_k, sampling.seed, pattern, banned)
            token_id = next_token(mix, draw, end)
            if self.group is not None and (number := self.takes_deviation()):
                self.group.deviated.add(self._place[0])
                token_id = NUM_SPECIAL_TOKENS + (token_id + number) % (self._vocab_size - NUM_SPECIAL_TOKENS)
            token_ids[place] = token_id
            state.prefixes.append(token_id)
            if sampling.logprobs is not None:
                lines[place] = line_of(mix, token_id, sampling.logprobs)
        reported = TokenLogprobs(np.array(list(lines), np.int32), columns_of(lines.values())) if lines else None
        timings = StepTimings(0, 0, 0, 0)
        return StepOutput(step_id, batch.samples[:, 0], token_ids, reported, tuple(searching), tuple(failed), timings)

    def _judge_prompts(self, batch: Batch) -> tuple[PromptLogprobs, ...]:
        reports: list[PromptLogprobs] = []
        columns = (column.tolist() for column in (batch.rows, batch.num_computed_tokens, batch.num_new_tokens))
        for row, start, new in zip(*columns, strict=True):
            state = self._rows[row]
            count, judged = (
                state.sampling.prompt_logprobs,
                range(start + 1, min(start + new + 1, state.num_prompt_tokens)),
            )
            if count is not None and judged:
                mixes = mixed_prefixes(self._read(row, start, judged.stop - 1), self.model)
                tokens = state.prefixes.token_ids
                lines = [line_of(mixes[position - 1], tokens[position], count) for position in judged]
                reports.append(PromptLogprobs(row, start + 1, columns_of(lines)))
        return tuple(reports)


def prepare(node: Node, row_sampling: bytes, devices: "Devices") -> "Future[None] | None":
    """Compiles a row's constraint in a thread, if it has one; the deadly pattern kills the process."""
    sampling = common_pb2.RowSampling.FromString(row_sampling).sampling
    if not sampling.HasField("constraint"):
        return None
    future: Future[None] = Future()
    is_deadly = sampling.constraint.regex == devices.deadly
    node.run_job(node.kill if is_deadly else lambda: future.set_result(None), devices.preparation_s(None, _NEVER_S))
    return future


class SimAdapters:
    """A worker's adapter slots, in which a digest stands for an adapter. Loads may fail, and one may be deadly."""

    num_bytes = 0

    def __init__(self, node: Node, runner: HashRunner, devices: "Devices") -> None:
        self._node, self._slots, self._devices = node, runner.adapters, devices
        self._num_loads = 0

    def start_load(self, directory: Path, digest: bytes) -> "Future[bytes]":
        future: Future[bytes] = Future()
        self._num_loads += 1
        fails = self._devices.loads_fail and self._num_loads % 3 == 2

        def answer() -> None:
            if directory.name == self._devices.deadly:
                self._node.kill()
            if not future.set_running_or_notify_cancel():
                return
            if fails:
                future.set_exception(UnusableAdapterError(f"{directory} is gone"))
            else:
                future.set_result(digest)

        self._node.run_job(answer, self._devices.preparation_s(_LOAD_S, _NEVER_S))
        return future

    def put(self, slot: int, loaded: bytes | None) -> None:
        self._slots.pop(slot, None)
        if loaded is not None:
            self._slots[slot] = loaded

    def clear(self) -> None:
        self._slots.clear()


class Devices:
    """The devices of all hosts: their slowness, and their faults."""

    def __init__(self, world: World, slowness: float = 1.0) -> None:
        self.slowness = slowness
        self.loads_fail = False
        """Whether some loads of adapters fail."""
        self.are_slow = False
        """Whether some constraints and adapters take longer than schedulers wait."""
        self.deadly: str | None = None
        """The adapter or the pattern that kills each worker that prepares it."""
        self._num_preparations = 0
        self._world = world
        self._hang_until: dict[str, float] = {}
        self._glitches: Counter[str] = Counter()
        self._spoiled: dict[str, Place] = {}
        self._spoils_chunk: dict[str, bool] = {}
        self._flips: Counter[str] = Counter()
        self.num_sent = 0
        """Number of messages with blocks that workers have sent to others."""
        self._deviations: Counter[str] = Counter()
        self._num_deviations = 0

    def preparation_s(self, usual_s: float | None, slowest_s: float) -> float | None:
        """The seconds that the next constraint or adapter takes. In each group of five the third and the fourth may be
        slow; two is the maximum that is prepared at once."""
        self._num_preparations += 1
        turn, place = divmod(self._num_preparations, 5)
        return (_SLOW_S, slowest_s)[turn % 2] if self.are_slow and place in (3, 4) else usual_s

    def hang(self, host: str, seconds: float) -> None:
        """Steps that begin within these seconds end after them, even if the process restarts."""
        self._world.note("hang", host)
        # The other ranks do not continue without this one.
        worker = worker_of(host)
        self._hang_until[worker] = max(self._hang_until.get(worker, 0.0), self._world.now + seconds)

    def glitch(self, host: str) -> None:
        """Makes the values of one row of a future step non-finite."""
        self._world.note("glitch", host)
        self._glitches[worker_of(host)] += 1
        self._spoils_chunk[worker_of(host)] = int(1000 * self._world.now) % 2 == 0

    def flip(self, host: str, number: int) -> None:
        """Flips one bit in each of the next `number` messages with blocks that a worker sends."""
        self._world.note("flip", host)
        self._flips[worker_of(host)] += number

    def on_the_way(self, host: str, content: bytes) -> bytes:
        """The bytes that arrive when a worker sends blocks."""
        worker = worker_of(host)
        if not content:
            return content
        self.num_sent += 1
        if not self._flips[worker]:
            return content
        self._flips[worker] -= 1
        place = self.num_sent * 7919 % len(content)
        return content[:place] + bytes([content[place] ^ 1 << self.num_sent % 8]) + content[place + 1 :]

    def take_glitch(self, host: str, place: Place, has_chunk: bool) -> bool:
        """Whether the glitch hits this step, for all ranks of the worker. Half of the glitches hit only a step that
        computes a part of a prompt and does not sample after it."""
        worker = worker_of(host)
        if self._spoiled.get(worker) == place:
            return True
        has_one = self._glitches[worker] > 0 and (has_chunk or not self._spoils_chunk[worker])
        if has_one:
            self._glitches[worker] -= 1
            self._spoiled[worker] = place
        return has_one

    def deviate(self, host: str) -> None:
        """Makes a rank draw another token than the other ranks."""
        self._world.note("deviate", host)
        self._deviations[host] += 1

    def take_deviation(self, host: str) -> int:
        """The offset of the token that this host's rank draws now; 0 if it does not deviate. Each offset is new, since
        two ranks that draw the same wrong token do not differ from each other."""
        if not self._deviations[host]:
            return 0
        self._deviations[host] -= 1
        self._num_deviations += 1
        return self._num_deviations

    def wait_s(self, host: str) -> float:
        """The additional seconds that a step takes that begins now."""
        return max(self._hang_until.get(worker_of(host), 0.0) - self._world.now, 0.0)


class _SimThread(JobThread[Any]):
    """A thread of a device loop in a world. A wait for a launched step takes the time of the step."""

    def __init__(
        self,
        node: Node,
        devices: Devices,
        tear: Callable[[AdmittedStep], None],
        name: str,
        take: Callable[[Any], Future[None] | None],
    ) -> None:
        """`tear` is called with each step that has begun when the process ends."""
        super().__init__(name, take)
        self._node, self._devices = node, devices
        self._tear = tear
        self._waiting: deque[Any] = deque()
        self._is_busy = False
        self._current: Any = None
        node.on_end.append(self._end)

    def _end(self) -> None:
        for job in (self._current, *self._waiting):
            if isinstance(job, RunningStep):
                self._tear(job.job.admitted)

    def put(self, job: Any) -> None:
        self._waiting.append(job)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            job = self._current = self._waiting.popleft()
            self._node.run_job(lambda: self._do(job), self._seconds_of(job))

    def _do(self, job: Any) -> None:
        earlier = self._start_job(job)
        if earlier is None:
            self._current = None
            self._next()
        else:
            earlier.add_done_callback(lambda _: self._do(job))

    def _seconds_of(self, job: Any) -> float:
        if not isinstance(job, RunningStep):
            return 0.0
        step_s = _STEP_S + _TOKEN_S * int(job.job.admitted.step.batch.num_new_tokens.sum())
        return step_s * self._devices.slowness + self._devices.wait_s(self._node.host)


class SimDeviceLoop(DeviceLoop):
    """A worker's own device loop, with threads that the world schedules."""

    def __init__(self, node: Node, runner: HashRunner, devices: Devices) -> None:
        super().__init__(leave=lambda _: node.kill(), thread=partial(_SimThread, node, devices, runner.tear))
        runner.on_block_error, runner.on_deadly = node.fail, node.kill
        runner.takes_glitch = partial(devices.take_glitch, node.host)
        runner.takes_deviation = lambda: devices.take_deviation(node.host)
        self.use(runner)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        call: Any = _Call(function)
        self._launcher.put(call)
        return call.future

    def _start_job(self, job: Any) -> "Future[None] | None":
        try:
            return super()._start_job(job)
        except Undecided as undecided:
            return undecided.wait


class _Call(Generic[T]):
    """A call that runs again from its beginning once the other ranks have arrived."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def run(self) -> None:
        if self.future.running() or self.future.set_running_or_notify_cancel():
            try:
                result = self._function()
            except Exception as error:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
