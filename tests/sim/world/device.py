"""A worker's device in a world: steps take virtual time, and tokens depend on all that a step reads.

Keys and values are hashes of all tokens up to their slot. The next token of a row is a function of every slot that it
reads through its block table, so one block that is wrong, stale or early makes another token.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from tests.sim.world.traffic import NUM_SPECIAL_TOKENS
from tests.sim.world.world import Node
from tests.support.fake_pool import FakePool, Prefixes
from tests.support.fake_runner import FakeRunner
from worker_svc.device.device_loop import DeviceLoop, JobThread, RunningStep, StepRunner

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

    # A step is launched when the device loop gets it, and its output is there when its time is over.
    is_asynchronous = True

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


class _SimThread(JobThread[Any]):
    """A thread of a device loop in a world. To wait for a launched step takes the time of the step."""

    def __init__(self, node: Node, name: str, take: Callable[[Any], Future[None] | None]) -> None:
        super().__init__(name, take)
        self._node = node
        self._waiting: deque[Any] = deque()
        self._is_busy = False

    def put(self, job: Any) -> None:
        self._waiting.append(job)
        if not self._is_busy:
            self._next()

    def _next(self) -> None:
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            job = self._waiting.popleft()
            self._node.run_job(lambda: self._do(job), _seconds_of(job))

    def _do(self, job: Any) -> None:
        earlier = self._take(job)
        if earlier is None:
            self._next()
        else:
            earlier.add_done_callback(lambda _: self._do(job))


def _seconds_of(job: Any) -> float:
    if not isinstance(job, RunningStep):
        return 0.0
    return _STEP_S + _TOKEN_S * int(job.job.admitted.step.batch.num_new_tokens.sum())


class SimDeviceLoop(DeviceLoop):
    """A worker's own device loop, whose threads the world steps."""

    def __init__(self, node: Node, runner: StepRunner) -> None:
        super().__init__(leave=lambda _: node.kill(), thread=functools.partial(_SimThread, node))
        self.use(runner)
