"""The results of a step: tensors on the device, copied to the host beside the next step, and reported from there."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.batch import non_finite_chunks
from worker_svc.device.block_moves import SealInventory
from worker_svc.device.streams import Stopwatch, Stream
from worker_svc.sampling.logprobs import (
    CandidateValues,
    LogprobValues,
    PromptPlan,
    find_failed_prompts,
    report_candidates,
    report_logprobs,
    report_prompt_logprobs,
)
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import Int32Array, Step, StepOutput, StepTimings

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class StepValues(Generic[A]):
    """All that a step computes for the host: tensors on the device, arrays on the host. s rows sample."""

    token_ids: A
    """[s] int64, the drawn tokens."""
    is_finite: A
    """[s] bool, of the logits."""
    finite_tokens: A | None = None
    """[T] bool, of the hidden states; None when every row of the batch samples."""
    logprobs: LogprobValues[A] | None = None
    candidates: CandidateValues[A] | None = None
    prompt_logprobs: LogprobValues[A] | None = None

    def map(self, function: Callable[[A], B]) -> "StepValues[B]":
        return StepValues(
            function(self.token_ids),
            function(self.is_finite),
            None if self.finite_tokens is None else function(self.finite_tokens),
            None if self.logprobs is None else self.logprobs.map(function),
            None if self.candidates is None else self.candidates.map(function),
            None if self.prompt_logprobs is None else self.prompt_logprobs.map(function),
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


def _begin_copy(source: Tensor) -> Tensor:
    if source.is_cpu:
        return source
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


class FailingRows:
    """Rows that fail when they sample, until the row gets another sequence: their prompt was judged by logits that are
    not finite, or their sampling was refused.

    A step reports only failures of rows that sample in it. Until then the log probabilities of a prompt are reported as
    they are: none reaches a client before the request ends.
    """

    def __init__(self) -> None:
        self._refusals: dict[int, str | None] = {}

    def update(self, step: Step, failed_prompts: Iterable[int]) -> tuple[NDArray[np.bool_], dict[int, str]]:
        """Which samples of a step fail, [s] bool, and the reasons of rows whose sampling was refused. To be called for
        all steps, in order.

        Args:
            failed_prompts: rows whose prompt was found to fail in this step.
        """
        changes, samples = step.row_changes, step.batch.samples
        if self._refusals:
            for row in (*(each.row for each in changes.assign), *changes.fork[:, 1].tolist()):
                self._refusals.pop(row, None)
        for each in changes.assign:
            if each.sampling.refusal is not None:
                self._refusals[each.row] = each.sampling.refusal
        for row in failed_prompts:
            self._refusals.setdefault(row, None)
        if not self._refusals:
            return np.zeros(len(samples), np.bool_), {}
        reasons = {row: self._refusals.get(source) for row, source in samples.tolist()}
        refused = {row: reason for row, reason in reasons.items() if reason is not None}
        return np.isin(samples[:, 1], list(self._refusals)), refused


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose work is queued on the device.

    Attributes:
        number: rises over all steps of the worker.
        rows: those that sample.
        columns: their parameters.
        prompts: the prompt tokens that are judged; None where there are none.
    """

    step: Step
    number: int
    queue_us: int
    rows: Int32Array
    columns: SamplingColumns
    prompts: PromptPlan | None
    copy: HostCopy
    stopwatch: Stopwatch
    seals: SealInventory
    failing_rows: FailingRows

    def wait(self) -> StepOutput:
        """The output, when the device has it; then the step's blocks are sealed. To be called once."""
        step, plan, values = self.step, self.prompts, self.copy.wait()
        judged = values.prompt_logprobs
        failed_prompts = () if plan is None or judged is None else find_failed_prompts(plan, judged)
        fails, refusals = self.failing_rows.update(step, failed_prompts)
        is_usable = values.is_finite & ~fails
        self.seals.add(step.sealed, self.number)
        draws = is_usable & (self.columns.num_candidates == 0)
        logprobs, candidates, chunks = values.logprobs, values.candidates, values.finite_tokens
        return StepOutput(
            step_id=step.step_id,
            rows=self.rows,
            token_ids=np.where(draws, values.token_ids, 0).astype(np.int32),
            logprobs=None if logprobs is None else report_logprobs(self.columns, logprobs, is_usable),
            candidates=(
                () if candidates is None else report_candidates(self.rows, self.columns, candidates, is_usable)
            ),
            failed_rows=tuple(self.rows[~is_usable].tolist()),
            timings=StepTimings(self.queue_us, *self.stopwatch.stages_us()),
            prompt_logprobs=() if plan is None or judged is None else report_prompt_logprobs(plan, judged),
            num_computed_tokens=int(step.batch.num_new_tokens.sum()),
            non_finite_chunks=() if chunks is None else non_finite_chunks(step.batch, chunks),
            refusals=refusals,
        )
