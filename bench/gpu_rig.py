"""A model runner that gets steps without a scheduler, two in flight."""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from quire.common.v1.common_pb2 import SamplingParameters
from worker_svc.device.kv_pool import KvPool, PoolRequest, allocate_pool, block_bytes, pool_geometry
from worker_svc.device.replay import GraphRecorder
from worker_svc.device.runner import LaunchedStep, ModelRunner
from worker_svc.models.base import CausalLM
from worker_svc.step import (
    AdmittedStep,
    AssignRow,
    Batch,
    CacheOperations,
    Int32Array,
    ModelGeometry,
    RowChanges,
    RowSampling,
    SealedBlocks,
    Step,
    StepOutput,
    WorkerLimits,
)

BLOCK_SIZE = 16
GREEDY = RowSampling(SamplingParameters(top_p=1.0))
_IN_FLIGHT = 2
Pairs = Sequence[tuple[int, int]]


class Rig:
    """Takes steps and returns their outputs.

    Args:
        recorder: if given, decodes are replayed.
        sampling: of all rows.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        num_rows: int,
        num_blocks: int,
        num_host_blocks: int = 0,
        recorder: GraphRecorder | None = None,
        sampling: RowSampling = GREEDY,
    ) -> None:
        swap_space = num_host_blocks * block_bytes(model, BLOCK_SIZE)
        shape = pool_geometry(model, PoolRequest(BLOCK_SIZE, num_blocks, None, swap_space, 0), None)
        self.pool: KvPool = allocate_pool(shape, model.device, model.dtype, with_padding=True)
        geometry = ModelGeometry(model.architecture, shape.dtype, model.vocab_size, model.max_model_len, "")
        self._runner = ModelRunner(model, self.pool, geometry, WorkerLimits(num_rows, 8192, _IN_FLIGHT, 0))
        self._running: deque[LaunchedStep] = deque()
        self._outputs: list[StepOutput] = []
        self._num_steps = 0
        self._sampling = sampling
        if recorder is not None:
            self._runner.record_graphs(recorder)

    def step(
        self,
        rows: Sequence[int],
        num_new: Sequence[int],
        num_computed: Sequence[int],
        *,
        assign: Mapping[int, tuple[Sequence[int], Sequence[int]]] | None = None,
        release: Sequence[int] = (),
        swap_out: Pairs = (),
        swap_in: Pairs = (),
        written: Sequence[int] = (),
    ) -> None:
        """Queues a step in which all rows sample.

        Args:
            assign: tokens and block table of each new row.
            written: blocks that the batch writes, if any of them was swapped out.
        """
        self._num_steps += 1
        pairs = np.zeros((0, 2), np.int32)
        assigned = tuple(
            AssignRow(row, _int32(tokens), _int32(table), self._sampling, len(tokens))
            for row, (tokens, table) in (assign or {}).items()
        )
        step = Step(
            step_id=self._num_steps,
            scheduler_epoch=1,
            cache_operations=CacheOperations(_pairs(swap_out), _pairs(swap_in), pairs),
            row_changes=RowChanges(_int32(release), assigned, pairs, (), (), np.zeros((0, 3), np.int32)),
            batch=Batch(_int32(rows), _int32(num_new), _int32(num_computed), _pairs([(row, row) for row in rows])),
            sealed=SealedBlocks(_int32(()), np.zeros((0, 32), np.uint8)),
        )
        self._running.append(self._runner.launch(AdmittedStep(step, _int32(written))))
        while len(self._running) >= _IN_FLIGHT:
            self._outputs.append(self._running.popleft().wait())

    def drain(self) -> list[StepOutput]:
        """Waits for all steps; returns the outputs since the last call."""
        while self._running:
            self._outputs.append(self._running.popleft().wait())
        outputs, self._outputs = self._outputs, []
        return outputs


def _int32(values: Sequence[int]) -> Int32Array:
    return np.array(values, np.int32)


def _pairs(values: Pairs) -> Int32Array:
    return np.array(values, np.int32).reshape(-1, 2)
