"""Runs admitted steps on the device: cache operations, row changes, model, sampler.

`launch` queues a step on the device and returns; `LaunchedStep.wait` gives its output. On CUDA the next step can be
launched before the one before has been waited for: what it needs of it, the sampled tokens, stays on the device. On
the CPU `launch` has done all the work when it returns.
"""

from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.device.batch import (
    SamplePlan,
    build_model_input,
    finite_tokens,
    non_finite_chunks,
    pad_batch,
    plan_samples,
    samples_every_token,
)
from worker_svc.device.cache_ops import BlockMoves
from worker_svc.device.decode_graphs import DecodeGraphs, GraphRecorder
from worker_svc.device.graph_shapes import GraphShapes
from worker_svc.device.kv_pool import KvPool
from worker_svc.device.recorded_forward import make_decodes, make_forward
from worker_svc.device.rows import Rows
from worker_svc.device.sealed_blocks import SealInventory
from worker_svc.device.streams import Streams
from worker_svc.device.transfer import HostCopy, Stopwatch
from worker_svc.info import ModelGeometry, WorkerLimits
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.sampling.candidates import Candidates, gather_candidates, report_candidates
from worker_svc.sampling.history import History
from worker_svc.sampling.logit_rules import apply_logit_rules
from worker_svc.sampling.logprobs import SampledLogprobs, gather_logprobs, report_logprobs
from worker_svc.sampling.prompt_logprobs import (
    FailingRows,
    PromptResult,
    compute_prompt_logprobs,
    find_failed_rows,
    plan_prompt_logprobs,
    report_prompt_logprobs,
)
from worker_svc.sampling.sampler import draw
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.steps import AdmittedStep, Batch, Int32Array, SealedBlocks, StepOutput, StepTimings
from worker_svc.to_device import to_device


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What was sampled, on the device."""

    rows: Int32Array
    columns: SamplingColumns
    token_ids: torch.Tensor
    is_finite: torch.Tensor
    logprobs: SampledLogprobs | None
    candidates: Candidates | None


@dataclass(frozen=True, slots=True)
class _Computed:
    """All that a step brought, on its way to the host."""

    sampled: _Sampled
    prompts: PromptResult | None
    has_chunks: bool
    copy: HostCopy

    @classmethod
    def of(
        cls, sampled: _Sampled, prompts: PromptResult | None, finite: torch.Tensor | None, streams: Streams
    ) -> "_Computed":
        """Starts the way to the host. `finite` is what `finite_tokens` says of the batch."""
        tensors = [sampled.token_ids, sampled.is_finite]
        tensors += [finite] if finite is not None else []
        tensors += sampled.logprobs.values.tensors() if sampled.logprobs is not None else []
        tensors += sampled.candidates.tensors() if sampled.candidates is not None else []
        tensors += prompts.values.tensors() if prompts is not None else []
        return cls(sampled, prompts, finite is not None, HostCopy(tensors, streams.compute, streams.results))


class LaunchedStep:
    """A step whose work is queued on the device."""

    def __init__(
        self,
        admitted: AdmittedStep,
        number: int,
        queue_us: int,
        stopwatch: Stopwatch,
        computed: _Computed,
        seals: SealInventory,
        failing_rows: FailingRows,
    ) -> None:
        self._step = admitted.step
        self._number = number
        self._queue_us = queue_us
        self._stopwatch = stopwatch
        self._computed = computed
        self._seals = seals
        self._failing_rows = failing_rows

    def wait(self) -> StepOutput:
        """The output, when the device has it; then the step's blocks are sealed. To be called once."""
        computed, sampled = self._computed, self._computed.sampled
        token_ids, is_finite, *rest = computed.copy.arrays()
        chunks = non_finite_chunks(self._step.batch, rest.pop(0)) if computed.has_chunks else ()
        failed_prompts = find_failed_rows(computed.prompts, rest[-4:]) if computed.prompts is not None else ()
        fails, refusals = self._failing_rows.take(self._step, failed_prompts)
        is_usable = is_finite & ~fails
        logprobs, candidates, prompt_logprobs = None, (), ()
        if sampled.logprobs is not None:
            arrays, rest = rest[:4], rest[4:]
            logprobs = report_logprobs(sampled.columns, sampled.logprobs.indices, arrays, is_usable)
        if sampled.candidates is not None:
            arrays, rest = rest[:2], rest[2:]
            candidates = report_candidates(sampled.rows, sampled.columns, sampled.candidates.indices, arrays, is_usable)
        if computed.prompts is not None:
            prompt_logprobs = report_prompt_logprobs(computed.prompts, rest)
        self._seals.add(self._step.sealed, self._number)
        draws = is_usable & (sampled.columns.num_candidates == 0)
        return StepOutput(
            step_id=self._step.step_id,
            rows=sampled.rows,
            token_ids=np.where(draws, token_ids, 0).astype(np.int32),
            logprobs=logprobs,
            candidates=candidates,
            failed_rows=tuple(sampled.rows[~is_usable].tolist()),
            timings=StepTimings(self._queue_us, *self._stopwatch.stages_us()),
            prompt_logprobs=prompt_logprobs,
            num_computed_tokens=int(self._step.batch.num_new_tokens.sum()),
            non_finite_chunks=chunks,
            refusals=refusals,
        )


class ModelRunner:
    """The device's side of one worker. Made and used by one thread, except for `LaunchedStep.wait`."""

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        geometry: ModelGeometry,
        limits: WorkerLimits,
        streams: Streams | None = None,
    ) -> None:
        """Without `streams` it takes those of the model's device."""
        self._model = model
        self._pool = pool
        self._streams = streams or Streams.of(model.device)
        self._moves = BlockMoves(pool, self._streams.compute, self._streams.swaps)
        # Behind those that steps name, one that pads batches.
        self._padding_row = limits.max_num_rows
        self._rows = Rows(
            limits.max_num_rows + 1,
            geometry.max_model_len,
            pool.geometry.blocks_for(geometry.max_model_len),
            model.device,
        )
        self._shapes = GraphShapes.up_to(limits.max_num_rows, geometry.max_model_len)
        self._graphs: DecodeGraphs | None = None
        self._run_model = make_forward(model, pool, geometry.max_model_len, limits)
        self._run_decodes = make_decodes(model, pool, geometry.max_model_len, limits)
        self._seals = SealInventory(pool.geometry.num_gpu_blocks)
        self._failing_rows = FailingRows()
        self._num_launched = 0

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the work is done."""
        return self._model.device.type == "cuda"

    def sealed_blocks(self) -> SealedBlocks:
        """All blocks whose content is final. To be asked when no step is running."""
        return self._seals.snapshot()

    @torch.inference_mode()
    def record_graphs(self, recorder: GraphRecorder) -> int:
        """From now on decode batches run as graphs; returns how many were recorded. To be called before any step.

        The pool must have a padding block. Raises whatever the device raises; decodes run as before then.
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
            Exception: whatever the device raises; rows and written blocks are in doubt then.
        """
        step = admitted.step
        self._model.ranks.agree(step.scheduler_epoch, step.step_id)
        self._num_launched += 1
        self._seals.begin_write(admitted.written_blocks, self._num_launched)
        stopwatch = Stopwatch(self._model.device)
        self._moves.apply(admitted)
        self._rows.apply(step.row_changes)
        stopwatch.mark()
        computed = self._run(step.batch, stopwatch)
        return LaunchedStep(
            admitted, self._num_launched, queue_us, stopwatch, computed, self._seals, self._failing_rows
        )

    def _run(self, batch: Batch, stopwatch: Stopwatch) -> _Computed:
        if not len(batch.rows):
            return self._draw_nothing(None, None, stopwatch)
        if self._run_decodes is not None and samples_every_token(batch):
            # No token lies within its prompt, so none has prompt log probabilities to report.
            logits = self._run_decodes(self._model_input(batch))
            return self._draw(plan_samples(batch), logits, None, None, stopwatch)
        hidden = self._forward(batch)
        finite = finite_tokens(batch, hidden)
        prompt_plan = plan_prompt_logprobs(batch, self._rows.prompts)
        prompts = prompt_plan and compute_prompt_logprobs(
            self._model, hidden, prompt_plan, self._rows.token_ids, self._rows.prompts.num_logprobs
        )
        if not len(batch.samples):
            return self._draw_nothing(prompts, finite, stopwatch)
        plan = plan_samples(batch)
        logits = self._model.logits(hidden[to_device(plan.logit_tokens, hidden.device)])
        return self._draw(plan, logits, prompts, finite, stopwatch)

    def _draw(
        self,
        plan: SamplePlan,
        logits: torch.Tensor,
        prompts: PromptResult | None,
        finite: torch.Tensor | None,
        stopwatch: Stopwatch,
    ) -> _Computed:
        stopwatch.mark()
        sampled = self._sample(plan, logits)
        stopwatch.mark()
        return _Computed.of(sampled, prompts, finite, self._streams)

    def _draw_nothing(
        self, prompts: PromptResult | None, finite: torch.Tensor | None, stopwatch: Stopwatch
    ) -> _Computed:
        stopwatch.mark()
        stopwatch.mark()
        return _Computed.of(self._nothing_sampled(), prompts, finite, self._streams)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states, a line for each token of the batch, and for padding behind them."""
        graphs = self._graphs
        if graphs is None or (shape := graphs.shape_for(batch)) is None:
            return self._run_model(self._model_input(batch))
        return graphs.run(shape, self._model_input(pad_batch(batch, shape.num_rows, self._padding_row)))

    def _model_input(self, batch: Batch) -> ModelInput:
        return build_model_input(batch, self._rows, self._pool.gpu, self._pool.geometry.block_size)

    def _sample(self, plan: SamplePlan, logits: torch.Tensor) -> _Sampled:
        device = logits.device
        if plan.logit_of_row is not None:
            logits = logits[to_device(plan.logit_of_row, device)]
        columns = self._rows.sampling.take(plan.rows)
        history = History(self._rows.token_ids, plan.rows, self._rows.prompts.num_tokens[plan.rows], plan.positions)
        apply_logit_rules(logits, columns, history)
        drawn = draw(logits, columns, plan.positions)
        rows, positions = to_device(np.stack((plan.rows, plan.positions)), device)
        self._rows.append(rows, positions, drawn.token_ids)
        logprobs = gather_logprobs(logits, drawn.token_ids, columns)
        candidates = gather_candidates(logits, columns)
        return _Sampled(plan.rows, columns, drawn.token_ids, drawn.is_finite, logprobs, candidates)

    def _nothing_sampled(self) -> _Sampled:
        device = self._model.device
        token_ids = torch.zeros(0, dtype=torch.int64, device=device)
        is_finite = torch.zeros(0, dtype=torch.bool, device=device)
        return _Sampled(np.zeros(0, np.int32), SamplingColumns.empty(0), token_ids, is_finite, None, None)
