"""Runs admitted steps on the device: cache operations, row changes, model, sampler.

`launch` queues a step on the device and returns; `LaunchedStep.wait` gives its output. On CUDA the next step can be
launched before the previous one has been waited for: what it needs of it, the sampled tokens, stays on the device. On
the CPU all work is done when `launch` returns.
"""

import logging
import time

import numpy as np
import torch

from worker_svc.device.batch import (
    SamplePlan,
    build_model_input,
    finite_tokens,
    pad_batch,
    plan_samples,
    samples_every_token,
)
from worker_svc.device.block_moves import BlockMoves, SealInventory
from worker_svc.device.graphs import CudaGraphRecorder, DecodeGraphs, GraphRecorder, GraphShapes
from worker_svc.device.kv_pool import KvPool
from worker_svc.device.recorded_forward import make_decodes, make_forward
from worker_svc.device.results import HostCopy, LaunchedStep, StepValues
from worker_svc.device.rows import FailedPrompts, Rows
from worker_svc.device.streams import Stopwatch, Streams
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.sampling.constraints import Masks, RowMatchers
from worker_svc.sampling.logit_rules import History, apply_logit_rules
from worker_svc.sampling.logprobs import (
    compute_prompt_logprobs,
    gather_candidates,
    gather_logprobs,
    plan_prompt_logprobs,
)
from worker_svc.sampling.sampler import Drawn, draw
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import AdmittedStep, Batch, ModelGeometry, SealedBlocks, WorkerLimits
from worker_svc.to_device import to_device

_logger = logging.getLogger(__name__)


class ModelRunner:
    """The device's side of one worker. Made and used by one thread, except for `LaunchedStep.wait`."""

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        geometry: ModelGeometry,
        limits: WorkerLimits,
        streams: Streams | None = None,
        matchers: RowMatchers | None = None,
    ) -> None:
        """Without `streams` it takes those of the model's device; without `matchers` no row has a constraint."""
        self._model = model
        self._pool = pool
        self._streams = streams or Streams.of(model.device)
        self._moves = BlockMoves(pool, self._streams.compute, self._streams.swaps)
        # The row after those that steps name pads batches.
        self._padding_row = limits.max_num_rows
        max_blocks = pool.geometry.blocks_for(geometry.max_model_len)
        self._rows = Rows(limits.max_num_rows + 1, geometry.max_model_len, max_blocks, model.device)
        self._shapes = GraphShapes.up_to(limits.max_num_rows, geometry.max_model_len)
        self._graphs: DecodeGraphs | None = None
        self._run_model = make_forward(model, pool, geometry.max_model_len, limits)
        self._run_decodes = make_decodes(model, pool, geometry.max_model_len, limits)
        self._matchers = matchers
        self._seals = SealInventory(pool.geometry.num_gpu_blocks)
        self._failed_prompts = FailedPrompts()
        self._num_launched = 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the work is done."""
        return self._model.device.type == "cuda"

    def sealed_blocks(self) -> SealedBlocks:
        """All blocks whose content is final. To be called when no step is running."""
        return self._seals.snapshot()

    @torch.inference_mode()
    def record_graphs(self, recorder: GraphRecorder) -> int:
        """Records graphs for decode batches, which run as graphs from then on. To be called before any step.

        The pool must have a padding block. Raises whatever the device raises; then decodes run without graphs.

        Returns:
            The number of graphs.
        """
        block = self._pool.padding_block
        assert block is not None, "a pool with a padding block"
        self._rows.hold_padding(self._padding_row, block)
        none = np.zeros(0, np.int32)
        nothing = Batch(none, none, none, np.zeros((0, 2), np.int32))
        padding = self._model_input(pad_batch(nothing, self._shapes.largest.num_rows, self._padding_row))
        num_columns = self._rows.block_tables.shape[1]
        self._graphs = DecodeGraphs.record(self._model, self._shapes, padding, num_columns, recorder)
        return len(tuple(self._shapes))

    @torch.inference_mode()
    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> LaunchedStep:
        """Queues a step, when all ranks have it.

        Raises:
            SupersededError: another rank is at a higher epoch; nothing was done.
            Exception: whatever the device raises; then the contents of rows and written blocks are undefined.
        """
        step, batch = admitted.step, admitted.step.batch
        self._model.ranks.agree(step.scheduler_epoch, step.step_id)
        self._num_launched += 1
        self._seals.begin_write(admitted.written_blocks, self._num_launched)
        stopwatch = Stopwatch(self._model.device)
        self._moves.apply(admitted)
        self._rows.apply(step.row_changes)
        stopwatch.mark()

        samples = plan_samples(batch)
        masks_made = None if self._matchers is None else self._matchers.begin(step.row_changes, samples.rows)
        logits = finite = prompts = prompt_logprobs = None
        if len(batch.rows) and self._run_decodes is not None and samples_every_token(batch):
            # No token is within its prompt, so none has prompt log probabilities.
            logits = self._run_decodes(self._model_input(batch))
        elif len(batch.rows):
            hidden = self._forward(batch)
            finite = finite_tokens(batch, hidden)
            prompts = plan_prompt_logprobs(batch, self._rows.sampling)
            if prompts is not None:
                prompt_logprobs = compute_prompt_logprobs(self._model, hidden, prompts, self._rows.token_ids)
            if len(samples.rows):
                logits = self._model.logits(hidden[to_device(samples.logit_tokens, hidden.device)])
        stopwatch.mark()

        columns = self._rows.sampling.take(samples.rows)
        drawn, logprobs, candidates = Drawn.none(self._model.device), None, None
        if logits is not None:
            masks = None if masks_made is None else masks_made.result()
            if masks is not None:
                masks.refuse(columns)
            elif columns.has_constraint.any():
                columns.refuse(columns.has_constraint, "sampling.constraint cannot be enforced by this worker")
            logits = self._change_logits(logits, samples, columns, masks)
            drawn = self._draw(logits, samples, columns)
            logprobs = gather_logprobs(logits, drawn.token_ids, columns)
            candidates = gather_candidates(logits, columns)
        stopwatch.mark()

        values = StepValues(drawn.token_ids, drawn.is_finite, finite, logprobs, candidates, prompt_logprobs)
        copy = HostCopy(values, self._streams.compute, self._streams.results)
        if self._matchers is not None and masks_made is not None:
            self._matchers.drew(samples.rows, copy.token_ids)
        return LaunchedStep(
            step=step,
            number=self._num_launched,
            queue_us=queue_us,
            rows=samples.rows,
            columns=columns,
            prompts=prompts,
            copy=copy,
            stopwatch=stopwatch,
            seals=self._seals,
            failed_prompts=self._failed_prompts,
        )

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states of the batch's tokens, and of padding after them."""
        graphs = self._graphs
        if graphs is None or (shape := graphs.shape_for(batch)) is None:
            return self._run_model(self._model_input(batch))
        return graphs.run(shape, self._model_input(pad_batch(batch, shape.num_rows, self._padding_row)))

    def _model_input(self, batch: Batch) -> ModelInput:
        return build_model_input(batch, self._rows, self._pool.gpu, self._pool.geometry.block_size)

    def _change_logits(
        self, logits: torch.Tensor, samples: SamplePlan, columns: SamplingColumns, masks: Masks | None
    ) -> torch.Tensor:
        """The logits of each sampling row, [s, vocab], after its constraint and its rules."""
        if samples.logit_of_row is not None:
            logits = logits[to_device(samples.logit_of_row, logits.device)]
        history = History(self._rows.token_ids, samples.rows, columns.num_prompt_tokens, samples.positions)
        apply_logit_rules(logits, columns, history, masks)
        return logits

    def _draw(self, logits: torch.Tensor, samples: SamplePlan, columns: SamplingColumns) -> Drawn:
        """Draws a token for each sampling row and appends it to the row."""
        drawn = draw(logits, columns, samples.positions)
        rows, positions = to_device(np.stack((samples.rows, samples.positions)), logits.device)
        self._rows.append(rows, positions, drawn.token_ids)
        return drawn


def record_cuda_graphs(runner: ModelRunner, device: torch.device) -> None:
    """Records the graphs of a runner. Where that fails, it logs a warning, and decodes run without graphs."""
    started, (free, _) = time.monotonic(), torch.cuda.mem_get_info(device)
    try:
        num_graphs = runner.record_graphs(CudaGraphRecorder(device))
    except RuntimeError as error:
        # What broke a recording is the context of the error at its end.
        _logger.warning("decodes run without CUDA graphs, which cannot be recorded: %s", error, exc_info=error)
        return
    taken = (free - torch.cuda.mem_get_info(device)[0]) / 2**20
    _logger.info("%d CUDA graphs in %.1f s and %.0f MiB", num_graphs, time.monotonic() - started, taken)
