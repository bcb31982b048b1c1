"""Runs the steps of a decoder that gives vectors or scores: a row that samples gets the vector of its prompt, and a
token without a meaning."""

import numpy as np
import torch

from worker_svc.device.flat_batch import find_lone_tokens, finite_tokens, plan_samples
from worker_svc.device.kv_pool import KvPool
from worker_svc.device.runner import HostCopy, ModelPass, ModelRunner, StepValues
from worker_svc.encoders.decoder_vectors import PromptVectors
from worker_svc.models.base import CausalLM
from worker_svc.sampling.sampler import Drawn
from worker_svc.step import Batch, ModelGeometry, RowChanges, WorkerLimits
from worker_svc.streams import Stopwatch, to_device


class VectorRunner(ModelRunner):
    """A runner without drafts, constraints and log probabilities. Rows and blocks are as for a model that generates
    text, and so is the result of a step, in addition to its vectors."""

    def __init__(
        self,
        model: CausalLM,
        pool: KvPool,
        geometry: ModelGeometry,
        limits: WorkerLimits,
        vectors: PromptVectors,
    ) -> None:
        super().__init__(model, pool, geometry, limits)
        self._vectors = vectors

    def _run(self, batch: Batch, changes: RowChanges, stopwatch: Stopwatch | None = None) -> tuple[ModelPass, HostCopy]:
        samples = plan_samples(batch)
        finite, drawn, vectors = None, Drawn.none(self._model.device), None
        if len(batch.rows):
            summaries = self._summaries(batch)
            finite = finite_tokens(batch, summaries)
            if len(samples.rows):
                vectors = self._vectors(summaries[to_device(samples.logit_tokens, summaries.device)])
                if samples.logit_of_row is not None:
                    vectors = vectors[to_device(samples.logit_of_row, vectors.device)]
                no_tokens = torch.zeros(len(vectors), dtype=torch.int64, device=vectors.device)
                drawn = Drawn(no_tokens, vectors.isfinite().all(1))
        if stopwatch is not None:
            stopwatch.mark()
        columns = self._rows.sampling.take(samples.rows)
        copy = self._copied(StepValues(drawn.token_ids, drawn.is_finite, finite, vectors=vectors))
        return ModelPass(batch, samples.rows, columns, drawn, None, None, np.zeros(0, np.int32)), copy

    def _summaries(self, batch: Batch) -> torch.Tensor:
        """The line of each token that `PromptVectors` makes, after its state was changed."""
        checkpoints, lone = self._checkpoints, None
        if not self.is_asynchronous and self._model.state is None:
            lone = find_lone_tokens(batch, self._rows.sampling.num_prompt_tokens)
        hidden = self._forward(batch, lone, checkpoints)
        if self._vectors.state is None:
            return hidden
        return self._vectors.summaries(hidden, self._model_input(batch, checkpoints))
