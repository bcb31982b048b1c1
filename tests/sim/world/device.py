"""A worker's device in a world: steps take virtual time, and tokens depend on all that a step reads.

Keys and values are hashes of all tokens up to their slot. The next token of a row is a function of every slot that it
reads through its block table, so one block that is wrong, stale or early makes another token.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from quire import clock
from tests.sim.world.world import Node
from tests.support.fake_pool import FakePool, Prefixes
from tests.support.fake_runner import FakeRunner
from worker_svc.device.device_loop import StepLane, StepRunner
from worker_svc.step import AdmittedStep, SupersededError

T = TypeVar("T")

NUM_SPECIAL_TOKENS = 16
_STEP_S, _TOKEN_S = 0.002, 0.000_02
_MAX_POSITIONS = 1 << 14
_WEIGHTS = np.arange(_MAX_POSITIONS, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) | np.uint64(1)


class _ReadablePool(FakePool):
    """A pool that says what its blocks hold."""

    def read(self, blocks: Sequence[int], end: int) -> np.ndarray:
        """[end] int64: what a row with these blocks finds in its slots."""
        return self._gpu[self._places(blocks, 0, end)]


class HashRunner(FakeRunner):
    """Its rows draw the token that the content of their blocks gives. Its pool is empty at first."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, *, num_host_blocks: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size, num_host_blocks=num_host_blocks)
        self._pool = self._readable = _ReadablePool(num_blocks, num_host_blocks, block_size)

    def _token_of(self, row: int, position: int) -> int:
        return token_after(self._readable.read(self._rows[row].blocks, position), self._vocab_size)


def token_after(content: np.ndarray, vocab_size: int) -> int:
    """The token that follows slots with this content."""
    mixed = int((content.view(np.uint64) * _WEIGHTS[: len(content)]).sum())
    return NUM_SPECIAL_TOKENS + (mixed >> 20) % (vocab_size - NUM_SPECIAL_TOKENS)


def undisturbed(prompt: Sequence[int], num_tokens: int, vocab_size: int) -> list[int]:
    """What a greedy request for so many tokens says where nothing happens to it."""
    prefixes = Prefixes(prompt)
    for _ in range(num_tokens):
        length = len(prefixes.token_ids)
        prefixes.append(token_after(prefixes.hashes(0, length), vocab_size))
    return prefixes.token_ids[len(prompt) :]


class SimDeviceLoop:
    """Runs steps one after the other, as `worker_svc.device.device_loop.DeviceLoop` does in its threads."""

    def __init__(self, node: Node, runner: StepRunner) -> None:
        self._node = node
        self._runner = runner
        self._jobs: deque[tuple[float, Callable[[], None]]] = deque()
        self._busy_since: float | None = None
        self._is_running = False

    def submit(self, lane: StepLane, admitted: AdmittedStep) -> None:
        """Queues a step."""
        batch = admitted.step.batch
        seconds = _STEP_S + _TOKEN_S * int(batch.num_new_tokens.sum())
        self._put(seconds, lambda: self._run_step(lane, admitted))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Runs a function after all earlier steps."""
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

        self._put(0.0, run)
        return future

    def busy_ms(self) -> int:
        """How long the current step takes by now."""
        return 0 if self._busy_since is None else int((clock.monotonic() - self._busy_since) * 1e3)

    def _put(self, seconds: float, work: Callable[[], None]) -> None:
        self._jobs.append((seconds, work))
        if not self._is_running:
            self._begin()

    def _begin(self) -> None:
        self._is_running = True
        seconds, work = self._jobs.popleft()
        self._busy_since = clock.monotonic() if seconds else None

        def finish() -> None:
            work()
            self._busy_since = None
            self._is_running = False
            if self._jobs:
                self._begin()

        self._node.run_job(finish, seconds)

    def _run_step(self, lane: StepLane, admitted: AdmittedStep) -> None:
        if lane.has_failed:
            return
        try:
            output = self._runner.launch(admitted).wait()
        except (SupersededError, Exception) as error:
            lane.has_failed = lane.has_ended = True
            lane.on_failure(admitted.step.step_id, error)
        else:
            lane.on_output(output)
