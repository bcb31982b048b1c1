"""A worker's device in a world: steps take virtual time, and tokens depend on all that a step reads.

Keys and values are hashes of all tokens up to their slot. What a row says is a function of every slot that it reads
through its block table (`model`), so one block that is wrong, stale or early makes another token.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from quire.common.v1 import common_pb2
from tests.sim.world.model import Draw, candidates, line_of, mixed, mixed_prefixes, next_token
from tests.sim.world.world import Node
from tests.support.fake_pool import FakePool
from tests.support.fake_runner import FakeRunner
from tests.support.logprobs import Line, columns_of
from worker_svc.device.device_loop import DeviceLoop, JobThread, RunningStep, StepRunner
from worker_svc.step import Batch, PromptLogprobs, RowCandidates, StepOutput, StepTimings, TokenLogprobs

_STEP_S, _TOKEN_S = 0.002, 0.000_02


class _ReadablePool(FakePool):
    """A pool that says what its blocks hold."""

    def read(self, blocks: Sequence[int], end: int) -> np.ndarray:
        """[end] int64: what a row with these blocks finds in its slots."""
        return self._gpu[self._places(blocks, 0, end)]


class HashRunner(FakeRunner):
    """Its rows draw what the content of their blocks gives. Its pool is empty at first."""

    # A step is launched when the device loop gets it, and its output is there when its time is over.
    is_asynchronous = True

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, *, num_host_blocks: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size, num_host_blocks=num_host_blocks)
        self._pool = self._readable = _ReadablePool(num_blocks, num_host_blocks, block_size)

    def _sample(self, step_id: int, batch: Batch) -> StepOutput:
        ends = dict(zip(batch.rows.tolist(), (batch.num_computed_tokens + batch.num_new_tokens).tolist(), strict=True))
        token_ids = np.zeros(len(batch.samples), np.int32)
        searching: list[RowCandidates] = []
        lines: dict[int, Line] = {}
        for place, (row, source) in enumerate(batch.samples.tolist()):
            end, state = ends[source], self._rows[row]
            sampling = state.sampling
            mix = mixed(self._readable.read(self._rows[source].blocks, end))
            if sampling.num_candidates is not None:
                best, logprobs = candidates(mix, sampling.num_candidates)
                searching.append(RowCandidates(row, np.array(best, np.int32), np.array(logprobs, np.float32)))
                continue
            pattern = "" if sampling.constraint is None else sampling.constraint.message.regex
            draw = Draw(sampling.parameters.temperature, sampling.parameters.top_k, sampling.seed, pattern)
            token_ids[place] = token_id = next_token(mix, draw, end)
            state.prefixes.append(token_id)
            if sampling.logprobs is not None:
                lines[place] = line_of(mix, token_id, sampling.logprobs)
        reported = TokenLogprobs(np.array(list(lines), np.int32), columns_of(lines.values())) if lines else None
        timings = StepTimings(0, 0, 0, 0)
        return StepOutput(step_id, batch.samples[:, 0], token_ids, reported, tuple(searching), (), timings)

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
                mixes = mixed_prefixes(self._readable.read(state.blocks, judged.stop - 1))
                tokens = state.prefixes.token_ids
                lines = [line_of(mixes[position - 1], tokens[position], count) for position in judged]
                reports.append(PromptLogprobs(row, start + 1, columns_of(lines)))
        return tuple(reports)


def prepare(node: Node, row_sampling: bytes) -> "Future[None] | None":
    """Compiles the constraint of a row in a thread, where it has one."""
    if not common_pb2.RowSampling.FromString(row_sampling).sampling.HasField("constraint"):
        return None
    future: Future[None] = Future()
    node.run_job(lambda: future.set_result(None))
    return future


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
