"""Runs the steps of an encoder. A text is computed as a whole, in the step that computes its last token; the chunks
before it only count. The result of its row is a vector, and a token without a meaning."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker_svc.device.seals import SealInventory
from worker_svc.encoders.encoder import PackedTexts
from worker_svc.encoders.pooling import PairScores, TextVectors
from worker_svc.step import AdmittedStep, RowChanges, RowVector, SealedBlocks, StepOutput, StepTimings
from worker_svc.streams import Stopwatch

_FAILURE = "the vector of the text, or its score, holds NaN or infinity"


@dataclass(frozen=True, slots=True)
class _Finished:
    """A step whose output is there."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


class EncoderRunner:
    """The device's side of an encoder's worker, on the CPU."""

    is_asynchronous = False

    def __init__(
        self,
        encoder: Callable[[PackedTexts], torch.Tensor],
        vectors: TextVectors | PairScores,
        num_blocks: int,
        *,
        max_tokens_at_once: int,
        separator: int | None = None,
    ) -> None:
        """Texts are computed together up to `max_tokens_at_once`; a longer one is computed by itself. `separator` is as
        in `PackedTexts.of`."""
        self._encoder, self._vectors = encoder, vectors
        self._max_tokens_at_once, self._separator = max_tokens_at_once, separator
        self._texts: dict[int, torch.Tensor] = {}
        self._seals = SealInventory(num_blocks)

    def sealed_blocks(self) -> SealedBlocks:
        """None: blocks have no content."""
        return self._seals.snapshot()

    def release_memory(self) -> None:
        """There is nothing to release."""

    @torch.inference_mode()
    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> _Finished:
        step, stopwatch = admitted.step, Stopwatch(torch.device("cpu"))
        self._apply(step.row_changes)
        stopwatch.mark()
        rows, sources = step.batch.samples.T.tolist() if len(step.batch.samples) else ([], [])
        computed = self._compute(list(dict.fromkeys(sources)))
        stopwatch.mark()
        found = {row: computed[source] for row, source in zip(rows, sources, strict=True)}
        failed = tuple(row for row, vector in found.items() if not np.isfinite(vector).all())
        stopwatch.mark()
        return _Finished(
            StepOutput(
                step_id=step.step_id,
                rows=step.batch.samples[:, 0],
                token_ids=np.zeros(len(rows), np.int32),
                logprobs=None,
                candidates=(),
                failed_rows=failed,
                timings=StepTimings(queue_us, *stopwatch.stages_us()),
                num_computed_tokens=int(step.batch.num_new_tokens.sum()),
                vectors=tuple(RowVector(row, vector) for row, vector in found.items() if row not in failed),
                failure=_FAILURE,
            )
        )

    def _apply(self, changes: RowChanges) -> None:
        for row in changes.release.tolist():
            self._texts.pop(row, None)
        for each in changes.assign:
            self._texts[each.row] = torch.from_numpy(each.token_ids.astype(np.int64))
        for parent, child in changes.fork.tolist():
            self._texts[child] = self._texts[parent]

    def _compute(self, rows: Sequence[int]) -> dict[int, np.ndarray]:
        """The vectors of rows, [size] float32."""
        found: dict[int, np.ndarray] = {}
        for part in self._parts(sorted(rows, key=lambda row: len(self._texts[row]))):
            texts = PackedTexts.of([self._texts[row] for row in part], self._separator)
            vectors = self._vectors(self._encoder(texts), texts.lengths).numpy()
            found.update(zip(part, vectors, strict=True))
        return found

    def _parts(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Rows that are computed together."""
        part: list[int] = []
        size = 0
        for row in rows:
            length = len(self._texts[row])
            if part and size + length > self._max_tokens_at_once:
                yield part
                part, size = [], 0
            part.append(row)
            size += length
        if part:
            yield part
