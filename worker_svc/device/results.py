"""The results of a step: tensors on the device, copied to the host beside the next step, and reported from there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from worker_svc.device.batch import non_finite_chunks
from worker_svc.device.block_moves import SealInventory
from worker_svc.device.rows import FailedPrompts
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

    def token_ids(self) -> np.ndarray:
        """The drawn tokens alone, for another thread than that of `wait`; waits for the device."""
        self._arrived.wait()
        return self._targets.token_ids.numpy()


def _begin_copy(source: Tensor) -> Tensor:
    if source.is_cpu:
        return source
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source, non_blocking=True)


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
    failed_prompts: FailedPrompts

    def wait(self) -> StepOutput:
        """The output, when the device has it; then the step's blocks are sealed. To be called once."""
        step, plan, values = self.step, self.prompts, self.copy.wait()
        judged = values.prompt_logprobs
        failed_prompts = () if plan is None or judged is None else find_failed_prompts(plan, judged)
        is_refused = self.columns.is_refused
        is_usable = values.is_finite & ~is_refused & ~self.failed_prompts.failing_samples(step, failed_prompts)
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
            refusals=dict(zip(self.rows[is_refused].tolist(), self.columns.refusal[is_refused], strict=True)),
        )
