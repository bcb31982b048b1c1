"""The worker's spans: one for each time that a traced sequence enters the batch, from the first step that computes its
tokens to the step that samples after the last of them.

A decode step computes one token of each row, so that its spans would be one per token. Only the scheduler's span shows
the time of decodes, and a decode step costs a look at a dict here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.tracing import Span, TraceContext, Tracer
from worker_svc.step import Step, StepOutput

_NAME = "prefill"


@dataclass(slots=True)
class _Prefill:
    """A traced row that has not sampled yet."""

    span: Span
    num_steps: int = 0
    num_tokens: int = 0
    in_model_us: int = 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The work of a step in flight for a traced row, which may hold another sequence when the step ends."""

    row: int
    prefill: _Prefill
    num_tokens: int
    samples: bool


class PrefillSpans:
    """The traced rows of one stream.

    Args:
        tracer: None if nothing is traced.
        rank: of this worker.
    """

    def __init__(self, tracer: Tracer | None, rank: int) -> None:
        self._tracer = tracer
        self._rank = rank
        self._open: dict[int, _Prefill] = {}
        self._in_flight: dict[int, list[_Chunk]] = {}

    def step_starts(self, step: Step, traced: Mapping[int, str]) -> None:
        """To be called for each accepted step, with the trace parents of the rows that enter with it."""
        if self._tracer is None or not (self._open or traced):
            return
        for row in step.row_changes.release.tolist():
            self._end_span(row, "released")
        for row, traceparent in traced.items():
            self._end_span(row, "released")
            span = self._tracer.start(_NAME, TraceContext(traceparent), {"quire.rank": self._rank})
            self._open[row] = _Prefill(span)
        batch, sampling = step.batch, set(step.batch.samples[:, 0].tolist())
        self._in_flight[step.step_id] = [
            _Chunk(row, self._open[row], num_tokens, row in sampling)
            for row, num_tokens in zip(batch.rows.tolist(), batch.num_new_tokens.tolist(), strict=True)
            if row in self._open
        ]

    def step_ends(self, output: StepOutput) -> None:
        """To be called for each step that has its output."""
        for chunk in self._in_flight.pop(output.step_id, ()):
            chunk.prefill.num_steps += 1
            chunk.prefill.num_tokens += chunk.num_tokens
            chunk.prefill.in_model_us += output.timings.model_us
            if chunk.samples and self._open.get(chunk.row) is chunk.prefill:
                self._end_span(chunk.row, "sampled")

    def close(self) -> None:
        """Ends the spans of all rows with the stream."""
        for row in list(self._open):
            self._end_span(row, "stream ended")

    def _end_span(self, row: int, outcome: str) -> None:
        prefill = self._open.pop(row, None)
        if prefill is None:
            return
        prefill.span.set(
            {
                "quire.outcome": outcome,
                "quire.steps": prefill.num_steps,
                "quire.computed_tokens": prefill.num_tokens,
                "gen_ai.latency.time_in_model_forward": prefill.in_model_us / 1e6,
            }
        )
        prefill.span.end()
