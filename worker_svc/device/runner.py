"""Runs admitted steps on the device (cache operations, row changes, model, sampler) and reports their results.

`launch` queues a step on the device and returns; `LaunchedStep.wait` gives its output. On CUDA the next step can be
launched before the previous one is waited for: the sampled tokens that it needs stay on the device. Results are copied
to the host during the next step. On the CPU all work is done when `launch` returns.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.runtime import clock
from quire.runtime.failpoint import failpoint
from worker_svc.device.block_moves import BlockMoves
from worker_svc.device.draft_choice import PayingDrafts
from worker_svc.device.draft_model import DraftModel
from worker_svc.device.draft_verification import Drafts, DraftStates, Kept
from worker_svc.device.flat_batch import (
    SamplePlan,
    build_model_input,
    find_lone_tokens,
    finite_tokens,
    non_finite_chunks,
    pad_batch,
    plan_samples,
    samples_every_token,
    split_outputs,
)
from worker_svc.device.kv_pool import KvPool
from worker_svc.device.pass_times import PassCosts, PassTimes
from worker_svc.device.replay import (
    CudaGraphRecorder,
    DecodeGraphs,
    DecodeRun,
    GraphRecorder,
    GraphShapes,
    make_decodes,
    make_forward,
)
from worker_svc.device.rows import FailingRows, Rows
from worker_svc.device.seals import SealInventory
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.sampling.constraints import Masks, RowMatchers
from worker_svc.sampling.drafters import Drafter
from worker_svc.sampling.logit_rules import History, apply_logit_rules
from worker_svc.sampling.logprobs import (
    CandidateValues,
    LogprobValues,
    PromptPlan,
    compute_prompt_logprobs,
    find_failed_prompts,
    gather_candidates,
    gather_logprobs,
    plan_prompt_logprobs,
    report_candidates,
    report_logprobs,
    report_prompt_logprobs,
)
from worker_svc.sampling.sampler import Drawn, draw
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import (
    AdmittedStep,
    Batch,
    Int32Array,
    ModelGeometry,
    RowChanges,
    RowVector,
    SealedBlocks,
    Step,
    StepOutput,
    StepTimings,
    WorkerLimits,
)
from worker_svc.streams import Stopwatch, Stream, Streams, to_device

A = TypeVar("A")
B = TypeVar("B")
_NONE = np.zeros(0, np.int32)
_MAX_ENDING = 8
"""Maximum rows for which a step checks whether all have ended and further passes are in vain; more rows seldom do."""
_NO_CHANGES = RowChanges(_NONE, (), np.zeros((0, 2), np.int32), (), (), np.zeros((0, 3), np.int32))
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepValues(Generic[A]):
    """All that a step computes for the host: tensors on the device, arrays on the host. s rows sample."""

    token_ids: A
    """[s] int64, the drawn tokens."""
    is_finite: A
    """[s] bool, of the logits."""
    finite_tokens: A | None = None
    """[T] bool, of the hidden states; None if every row of the batch samples."""
    logprobs: LogprobValues[A] | None = None
    candidates: CandidateValues[A] | None = None
    prompt_logprobs: LogprobValues[A] | None = None
    vectors: A | None = None
    """[s, size] float32, of a model that gives vectors instead of texts."""

    def map(self, function: Callable[[A], B]) -> "StepValues[B]":
        return StepValues(
            function(self.token_ids),
            function(self.is_finite),
            None if self.finite_tokens is None else function(self.finite_tokens),
            None if self.logprobs is None else self.logprobs.map(function),
            None if self.candidates is None else self.candidates.map(function),
            None if self.prompt_logprobs is None else self.prompt_logprobs.map(function),
            None if self.vectors is None else function(self.vectors),
        )


class HostCopy:
    """Values on their way to the host. To be made when the kernels that compute them are queued."""

    def __init__(self, values: StepValues[Tensor], compute: Stream, results: Stream) -> None:
        # Kept until they have arrived: torch would give their memory to the next step.
        self._sources: StepValues[Tensor] | None = values
        results.wait_for(compute.mark())
        with results.used():
            self._targets = values.map(_begin_copy)
        self._arrived = results.mark()

    def wait(self) -> StepValues[np.ndarray]:
        """The values on the host; waits for the device."""
        self._arrived.wait()
        self._sources = None
        return self._targets.map(Tensor.numpy)

    def token_ids(self) -> np.ndarray:
        """Waits for the device and returns the drawn tokens only; for other threads than the thread of `wait`."""
        self._arrived.wait()
        return self._targets.token_ids.numpy()


def _begin_copy(source: Tensor) -> Tensor:
    if source.is_cpu:
        return source
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class ModelPass:
    """One run of the model, or several of a step.

    Attributes:
        batch: The batch that was computed, including drafts.
        rows: For each drawn token, the row that drew it.
        columns: Sampling parameters of these rows.
        drawn: The drawn tokens.
        kept: The number of tokens that each sample of the step drew; None if each drew one and none had drafts.
        prompts: The prompt tokens that are scored; None if there are none.
        left_out: Rows that drew nothing in the last of several passes.
    """

    batch: Batch
    rows: Int32Array
    columns: SamplingColumns
    drawn: Drawn
    kept: Kept | None
    prompts: PromptPlan | None
    left_out: Int32Array

    @property
    def num_drafts(self) -> Int32Array:
        """Number of verified drafts of each sample; empty if no sample had any."""
        return _NONE if self.kept is None else self.kept.num_drafts

    @property
    def is_usable(self) -> bool:
        """Whether no row fails, on the host."""
        none_is_left_out = self.kept is None or bool(self.kept.num_tokens.all())
        return none_is_left_out and bool(self.drawn.is_finite.all()) and not self.columns.is_refused.any()


def _joined(passes: Sequence[ModelPass], batch: Batch, sampling: SamplingColumns) -> ModelPass:
    """Passes of a batch of decodes as one, on the host."""
    kept = Kept.from_passes([each.kept for each in passes], len(batch.samples))
    drawn = Drawn(*(torch.cat([getattr(each.drawn, name) for each in passes]) for name in ("token_ids", "is_finite")))
    drawn, rows = drawn.take(kept.draws), np.concatenate([each.rows for each in passes])[kept.draws]
    rows_ran, num_new, computed, samples = (
        np.concatenate([getattr(each.batch, name) for each in passes])
        for name in ("rows", "num_new_tokens", "num_computed_tokens", "samples")
    )
    ran, last = Batch(rows_ran, num_new, computed, samples), passes[-1].kept
    left_out = _NONE if last is None else batch.samples[last.num_tokens == 0, 0]
    return ModelPass(ran, rows, sampling.take(rows), drawn, kept, None, left_out)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued on the device. `number` rises over all steps of the worker."""

    step: Step
    ran: ModelPass
    copy: HostCopy
    number: int
    queue_us: int
    stopwatch: Stopwatch
    seals: SealInventory
    failing_rows: FailingRows

    def wait(self) -> StepOutput:
        """The output, when the device has it; then the step's blocks are sealed. To be called once."""
        step, ran, values = self.step, self.ran, self.copy.wait()
        plan = ran.prompts
        scored = values.prompt_logprobs
        failed_prompts = () if plan is None or scored is None else find_failed_prompts(plan, scored)
        self._refuse_left_without_tokens(values.is_finite)
        is_refused = ran.columns.is_refused
        failing = self.failing_rows.failing_samples(step, failed_prompts)
        self.failing_rows.add(ran.left_out)
        if ran.kept is not None:
            failing = failing.repeat(ran.kept.num_tokens)
        is_usable = values.is_finite & ~is_refused & ~failing
        self.seals.add(step.sealed, self.number)
        failpoint("worker.step.sealed")
        draws = is_usable & (ran.columns.num_candidates == 0)
        logprobs, candidates, chunks = values.logprobs, values.candidates, values.finite_tokens
        return StepOutput(
            step_id=step.step_id,
            rows=step.batch.samples[:, 0],
            token_ids=np.where(draws, values.token_ids, 0).astype(np.int32),
            logprobs=None if logprobs is None else report_logprobs(ran.columns, logprobs, is_usable),
            candidates=(() if candidates is None else report_candidates(ran.rows, ran.columns, candidates, is_usable)),
            # A row whose prompt failed may have drawn several tokens since.
            failed_rows=tuple(dict.fromkeys(ran.rows[~is_usable].tolist())),
            timings=StepTimings(self.queue_us, *self.stopwatch.stages_us()),
            prompt_logprobs=() if plan is None or scored is None else report_prompt_logprobs(plan, scored),
            num_computed_tokens=int(ran.batch.num_new_tokens.sum()),
            non_finite_chunks=() if chunks is None else non_finite_chunks(ran.batch, chunks),
            refusals=dict(zip(ran.rows[is_refused].tolist(), ran.columns.refusal[is_refused], strict=True)),
            num_tokens=_NONE if ran.kept is None else ran.kept.num_tokens,
            num_drafts=_NONE if ran.kept is None else ran.kept.num_drafts,
            num_passes=1 if ran.kept is None else ran.kept.num_passes,
            vectors=()
            if values.vectors is None
            else tuple(map(RowVector, ran.rows[is_usable].tolist(), values.vectors[is_usable])),
        )

    def _refuse_left_without_tokens(self, is_finite: NDArray[np.bool_]) -> None:
        """A constrained row has logits of -infinity only, if other rules exclude all that its constraint allows. A beam
        of such a row ends without a continuation."""
        columns = self.ran.columns
        draws = columns.num_candidates == 0
        excluded = draws & columns.has_constraint & columns.has_rules & ~columns.is_refused & ~is_finite
        if excluded.any():
            columns.refuse(
                excluded,
                "sampling.constraint or sampling.thinking_token_budget: no token may follow that allowed_token_ids and "
                "bad_words leave, or the model's generation_config.json excludes all such tokens; relax one of them",
            )


class ModelRunner:
    """The device's side of one worker. Made and used by one thread, except for `LaunchedStep.wait`.

    Attributes:
        seals: The blocks whose content is final.
        is_asynchronous: Whether `launch` returns before the work is done.
    """

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        geometry: ModelGeometry,
        limits: WorkerLimits,
        streams: Streams | None = None,
        matchers: RowMatchers | None = None,
        drafter: Drafter | None = None,
        multi_step_s: float = 0.0,
        draft_model: CausalLM | None = None,
    ) -> None:
        """Without `streams` it takes the streams of the model's device; without `matchers` no row has a constraint.

        Args:
            drafter: guesses up to `limits.max_drafts` further tokens of a sample.
            multi_step_s: seconds for which the decodes of a step may go on, up to `limits.max_passes` passes; for one
                rank. Both are for a model on the CPU.
            draft_model: whose layers the pool has, too; guesses where the drafter has no guess.
        """
        self._model = model
        self._pool = pool
        self.is_asynchronous = model.device.type == "cuda"
        self._streams = streams or Streams.on_device(model.device)
        self._moves = BlockMoves(pool, self._streams.compute, self._streams.swaps)
        # The row after the rows of steps pads batches.
        self._padding_row = limits.max_num_rows
        max_blocks = pool.geometry.blocks_for(geometry.max_model_len)
        num_groups, state_blocks = pool.geometry.groups.num_groups, pool.geometry.state_blocks
        sizes = limits.max_num_rows + 1, geometry.max_model_len, max_blocks
        self._rows = Rows(*sizes, model.device, num_groups, state_blocks)
        self._caches = pool.layers_of(model)
        self._shapes = GraphShapes.up_to(limits.max_num_rows, geometry.max_model_len)
        self._graphs: DecodeGraphs | None = None
        self._run_model = make_forward(model, pool, geometry.max_model_len, limits)
        self._run_decodes = make_decodes(model, pool, geometry.max_model_len, limits)
        self._matchers = matchers
        forced = matchers.forced if matchers is not None else lambda rows: {}
        self._draft_model, drafts = None, None
        if draft_model is not None:
            length = geometry.max_model_len
            self._draft_model = DraftModel(draft_model, pool, self._rows, model.vocab_size, length, limits)
        if limits.max_drafts or limits.max_passes > 1:
            states = DraftStates(pool, self._rows) if state_blocks else None
            drafts = Drafts(self._rows, drafter, forced, limits, self._draft_model, states)
        self._drafts, self._multi_step_s, self._pass_times = drafts, multi_step_s, PassTimes()
        self.seals = pool.seals or SealInventory(pool.gpu[0].shape[1])
        self._failing_rows = FailingRows(has_states=state_blocks > 0)
        self._num_launched = 0
        # The checkpoints of the step that runs.
        self._checkpoints = _NO_CHANGES.state_tables

    def predict_passes(self, times: PassTimes) -> None:
        """Uses these predictions of passes from now on, and reports the time of passes to them."""
        self._pass_times = times

    @torch.inference_mode()
    def measure_draft_model(self, context_s: float) -> PassCosts | None:
        """Costs of the draft model's passes, to be measured after the first steps; None if there is no draft model."""
        return None if self._draft_model is None else self._draft_model.measured_costs(context_s)

    def choose_drafts(self, choice: PayingDrafts) -> None:
        """Chooses drafts by this from now on. Without it there are none."""
        if self._drafts is not None:
            self._drafts.choice = choice

    def sealed_blocks(self) -> SealedBlocks:
        """All blocks whose content is final. To be called when no step is running."""
        return self.seals.snapshot()

    def release_memory(self) -> None:
        """Gives the memory of a pool on the CPU back to the system. To be called when no step is running."""
        self.seals.clear()
        self._pool.release()

    @torch.inference_mode()
    def record_graphs(self, recorder: GraphRecorder) -> int:
        """Records graphs for decode batches, which run as graphs from then on. To be called before any step.

        The pool must have a padding block. Raises any error of the device; then decodes run without graphs.

        Returns:
            The number of graphs.
        """
        block = self._pool.padding_block
        assert block is not None, "a pool with a padding block"
        self._rows.hold_padding(self._padding_row, block)
        none = np.zeros(0, np.int32)
        nothing = Batch(none, none, none, np.zeros((0, 2), np.int32))
        padding = self._model_input(pad_batch(nothing, self._shapes.largest.num_rows, self._padding_row))
        num_columns = self._rows.by_group.shape[1]
        self._graphs = DecodeGraphs.record(self._model, self._shapes, padding, num_columns, recorder)
        return len(tuple(self._shapes))

    @torch.inference_mode()
    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> LaunchedStep:
        """Queues a step, when all ranks have it.

        Raises:
            SupersededError: another rank is at a higher epoch; nothing was done.
            Exception: any error of the device; then the contents of rows and written blocks are undefined.
        """
        step, batch = admitted.step, admitted.step.batch
        self._model.ranks.agree(step.scheduler_epoch, step.step_id)
        self._num_launched += 1
        self.seals.begin_write(admitted.written_blocks, self._num_launched)
        stopwatch = Stopwatch(self._model.device)
        self._moves.run(admitted)
        failpoint("worker.step.moved")
        if self._drafts is not None:
            self._drafts.release_rows(step.row_changes.release)
        self._rows.apply_row_changes(step.row_changes, admitted.max_forked)
        self._checkpoints = step.checkpoints
        stopwatch.mark()

        if self._drafts is not None:
            self._drafts.apply_row_changes(step.row_changes)
            self._drafts.begin_pass(batch, self._multi_step_s, is_first=True)
        ran, copy = self._run(batch, step.row_changes, stopwatch)
        if batch.max_passes > 1 and len(passes := self._run_on(batch, ran, stopwatch)) > 1:
            ran = _joined(passes, batch, self._rows.sampling)
            copy = self._copied(StepValues(ran.drawn.token_ids, ran.drawn.is_finite))
        if self._drafts is not None:
            self._drafts.end_step(batch)
        stopwatch.mark()
        return LaunchedStep(
            step=step,
            ran=ran,
            copy=copy,
            number=self._num_launched,
            queue_us=queue_us,
            stopwatch=stopwatch,
            seals=self.seals,
            failing_rows=self._failing_rows,
        )

    def _copied(self, values: StepValues[Tensor]) -> HostCopy:
        return HostCopy(values, self._streams.compute, self._streams.results)

    def _run_on(self, batch: Batch, first: "ModelPass", stopwatch: Stopwatch) -> Sequence["ModelPass"]:
        """Runs the first pass of a batch of decodes, and further passes while they fit the time."""
        passes, elapsed_s, num_rows, drafts = [first], stopwatch.elapsed_s, len(batch.rows), self._drafts
        assert drafts is not None, "several passes need the drafts' counts of tokens"
        self._pass_times.record_pass(num_rows, elapsed_s, first.num_drafts, is_first=True)
        run: DecodeRun | None = None
        # The position of each row's newest token before the step.
        samplers, kept = batch.samples[:, 0], first.kept
        newest = drafts.num_tokens(samplers) - (1 if kept is None else kept.num_tokens) - 1
        while elapsed_s + self._pass_times.expected_s(num_rows) <= self._multi_step_s:
            further = self._further(batch, passes)
            if further is None or self._have_ended(samplers, newest, drafts.num_tokens(samplers)):
                break
            if drafts.begin_pass(further, self._multi_step_s - elapsed_s, is_first=False):
                run = None
            elif run is None or run.num_left == 0:
                run = self._plain_run(further, first.columns, drafts)
            if run is None:
                passes.append(self._run(further, _NO_CHANGES)[0])
            else:
                passes.append(self._run_plain(run, batch, first, drafts))
            before_s, elapsed_s = elapsed_s, stopwatch.elapsed_s
            if not drafts.looked_in_vain:
                # The time of the look for guesses is no part of a pass without drafts.
                self._pass_times.record_pass(num_rows, elapsed_s - before_s, passes[-1].num_drafts, is_first=False)
        return passes

    def _have_ended(self, rows: NDArray[np.integer], begins: NDArray[np.integer], ends: NDArray[np.integer]) -> bool:
        """Whether each of a few rows has a token, between these positions, that ends it. The previous step may have
        drawn it before the scheduler learns of it."""
        if len(rows) > _MAX_ENDING:
            return False
        token_ids, endings = self._rows.token_ids.numpy(), self._rows.sampling.endings
        places = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
        return all(not set(token_ids[row, begin:end].tolist()).isdisjoint(endings[row]) for row, begin, end in places)

    def _plain_run(self, batch: Batch, columns: SamplingColumns, drafts: Drafts) -> DecodeRun | None:
        """All passes that a batch of decodes may have, if its rows need only a draw and have no drafts."""
        if (decodes := self._run_decodes) is None or not samples_every_token(batch):
            return None
        is_special = columns.changes_logits | columns.reports_more | columns.is_refused
        if len(is_special) != len(batch.rows) or is_special.any():
            return None
        num_passes = min(batch.max_passes, 1 + int(batch.max_drafts.min()))
        starts = drafts.num_tokens(batch.rows) - 1
        block_size, checkpoints = self._pool.geometry.block_size, self._checkpoints
        return DecodeRun(decodes, self._rows, batch.rows, columns, starts, num_passes, block_size, checkpoints)

    def _run_plain(self, run: DecodeRun, batch: Batch, first: "ModelPass", drafts: Drafts) -> "ModelPass":
        """One pass of `_plain_run`. Its rows and their parameters are the same as in the step's first pass."""
        drawn, kept, rows, columns = run.next(), None, first.rows, first.columns
        token_ids, is_usable = drawn.token_ids.numpy(), drawn.is_finite.numpy()
        if not is_usable.all():
            kept = Kept.where(is_usable)
            rows, columns, drawn = rows[kept.draws], columns.take(kept.draws), drawn.take(kept.draws)
        drafts.extend(rows, token_ids)
        return ModelPass(batch, rows, columns, drawn, kept, None, _NONE)

    def _further(self, batch: Batch, passes: Sequence["ModelPass"]) -> Batch | None:
        """Returns the batch of decodes after its latest draws, to run again; None if it may not run again, if a row may
        have no further token, or if a row reports more than tokens."""
        if len(passes) == batch.max_passes:
            return None
        num_more = 1 + batch.max_drafts - sum(1 if each.kept is None else each.kept.num_tokens for each in passes)
        last = passes[-1]
        if (num_more < 1).any() or last.columns.reports_more.any() or not last.is_usable:
            return None
        return replace(batch, max_drafts=num_more - 1, max_passes=batch.max_passes - len(passes))

    def _run(
        self, batch: Batch, changes: RowChanges, stopwatch: Stopwatch | None = None
    ) -> "tuple[ModelPass, HostCopy]":
        """Runs the model once. `stopwatch`, in the first pass of a step, is marked behind the model."""
        drafted, asked, checkpoints = None, batch, self._checkpoints
        if self._drafts is not None:
            drafted = self._drafts.expand(batch, checkpoints)
            batch, checkpoints = drafted.batch, drafted.checkpoints
        of_model = batch
        places = None if drafted is None else drafted.places
        lone: NDArray[np.bool_] | None = None
        if not self.is_asynchronous:
            num_prompt_tokens = self._rows.sampling.num_prompt_tokens
            if (split := split_outputs(batch, num_prompt_tokens, places)) is not None:
                batch, places = split
            # With states there is none, since a token that is computed twice would count twice.
            lone = find_lone_tokens(batch, num_prompt_tokens) if self._model.state is None else None
        samples = plan_samples(batch, places)
        masks_made = None
        if self._matchers is not None:
            inputs = None if drafted is None else drafted.inputs
            masks_made = self._matchers.start_masks(changes, samples.rows, self._rows.sampling.has_constraint, inputs)
        logits = finite = prompts = prompt_logprobs = None
        if len(batch.rows) and lone is None and self._run_decodes is not None and samples_every_token(batch):
            # No token is within its prompt, so none has prompt log probabilities.
            logits = self._run_decodes(self._model_input(batch, checkpoints))
        elif len(batch.rows):
            hidden = self._forward(batch, lone, checkpoints)
            finite = finite_tokens(batch, hidden)
            prompts = plan_prompt_logprobs(batch, self._rows.sampling)
            if prompts is not None:
                prompt_logprobs = compute_prompt_logprobs(self._model, hidden, prompts, self._rows.token_ids)
            if len(samples.rows):
                logits = self._model.logits(hidden[to_device(samples.logit_tokens, hidden.device)])
        if self._draft_model is not None:
            self._draft_model.follow(of_model)
        if stopwatch is not None:
            stopwatch.mark()

        rows, columns = samples.rows, self._rows.sampling.take(samples.rows)
        drawn, logprobs, candidates = Drawn.none(self._model.device), None, None
        if logits is not None:
            masks = None if masks_made is None else masks_made.result()
            if masks is not None:
                masks.refuse(columns)
            elif columns.has_constraint.any():
                problem = "sampling.constraint and sampling.thinking_token_budget cannot be enforced by this worker"
                columns.refuse(columns.has_constraint, problem)
            logits = self._change_logits(logits, samples, columns, masks)
            drawn = self._draw(logits, samples, columns)
        kept = None
        if self._drafts is not None and drafted is not None:
            kept = self._drafts.record_draws(asked, drafted, drawn, columns, is_first=stopwatch is not None)
        if kept is not None and logits is not None:
            rows, columns, drawn = rows[kept.draws], columns.take(kept.draws), drawn.take(kept.draws)
            if columns.reports_more.any():
                logits = logits[torch.from_numpy(kept.draws)]
        if logits is not None:
            logprobs = gather_logprobs(logits, drawn.token_ids, columns)
            candidates = gather_candidates(logits, columns)
        values = StepValues(drawn.token_ids, drawn.is_finite, finite, logprobs, candidates, prompt_logprobs)
        copy = self._copied(values)
        if self._matchers is not None and masks_made is not None:
            self._matchers.record_draws(rows, copy.token_ids)
        return ModelPass(batch, rows, columns, drawn, kept, prompts, _NONE), copy

    def _forward(self, batch: Batch, lone: NDArray[np.bool_] | None, checkpoints: Int32Array) -> torch.Tensor:
        """Hidden states of the batch's tokens and of padding after them. `lone` comes from `find_lone_tokens`."""
        if lone is not None:
            return self._forward_pairs(batch, lone)
        graphs = self._graphs
        if graphs is None or (shape := graphs.shape_for(batch)) is None:
            return self._run_model(self._model_input(batch, checkpoints))
        return graphs.run(shape, self._model_input(pad_batch(batch, shape.num_rows, self._padding_row)))

    def _forward_pairs(self, batch: Batch, lone: NDArray[np.bool_]) -> torch.Tensor:
        """The same, with each of the `lone` tokens computed together with the token before it. The keys and values of
        the earlier token are in the pool; its recomputed ones go to the padding block."""
        pairs = replace(
            batch, num_new_tokens=batch.num_new_tokens + lone, num_computed_tokens=batch.num_computed_tokens - lone
        )
        new, size = pairs.num_new_tokens, self._pool.geometry.block_size
        firsts = (np.cumsum(new) - new)[lone]
        inputs, block = self._model_input(pairs), self._pool.padding_block
        assert block is not None, "a pool with a padding block"
        for group in inputs.groups:
            group.slot_mapping.numpy()[firsts] = block * size + np.arange(len(firsts)) % size
        return self._run_model(inputs)[torch.from_numpy(np.delete(np.arange(new.sum()), firsts))]

    def _model_input(self, batch: Batch, checkpoints: Int32Array | None = None) -> ModelInput:
        return build_model_input(batch, self._rows, self._caches, self._pool.geometry.block_size, checkpoints)

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
        self._rows.append(samples.rows, samples.positions, drawn.token_ids)
        return drawn


def record_cuda_graphs(runner: ModelRunner, device: torch.device) -> None:
    """Records the graphs of a runner. If that fails, it logs a warning, and decodes run without graphs."""
    started, (free, _) = clock.monotonic(), torch.cuda.mem_get_info(device)
    try:
        num_graphs = runner.record_graphs(CudaGraphRecorder(device))
    except RuntimeError as error:
        # The error that broke a recording is the context of the error at its end.
        _logger.warning("decodes run without CUDA graphs, which cannot be recorded: %s", error, exc_info=error)
        return
    taken = (free - torch.cuda.mem_get_info(device)[0]) / 2**20
    _logger.info("%d CUDA graphs in %.1f s and %.0f MiB", num_graphs, clock.monotonic() - started, taken)
