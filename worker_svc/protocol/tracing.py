"""The worker's spans: one for each time that a traced sequence enters the batch, from the first step that computes its
tokens to the step that samples after the last of them.

A decode step computes one token of each row, so that its spans would be one per token. Only the scheduler's span shows
the time of decodes, and a decode step costs a look at a dict here.

An interceptor watches the step stream; sessions know nothing of it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from quire.rpc.interceptors import Behavior, remake
from quire.tracing import Span, TraceContext, Tracer
from worker_svc.protocol.convert import StepOutline, answer_of, has_traces, outline_of

RUN_METHOD = "/quire.worker.v1.WorkerService/Run"
_NAME = "prefill"


class PrefillSpans(grpc.aio.ServerInterceptor):
    """Watches every Run call. `rank` is that of this worker."""

    def __init__(self, tracer: Tracer, rank: int) -> None:
        self._tracer = tracer
        self._rank = rank

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method != RUN_METHOD:
            return handler
        return remake(handler, self._watched, request_deserializer=handler.request_deserializer)

    def _watched(self, behavior: Behavior) -> Behavior:
        async def run(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            watch = StreamWatch(self._tracer, self._rank)
            responses = behavior(watch.passing(requests), context)
            try:
                async for response in responses:
                    watch.see_response(response)
                    yield response
            finally:
                await responses.aclose()
                watch.close()

        return run


@dataclass(slots=True)
class _Prefill:
    """A traced row that has not sampled yet."""

    span: Span
    num_steps: int = 0
    num_tokens: int = 0
    in_model_us: int = 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a step in flight computes for a traced row, which may hold another sequence when the answer comes."""

    row: int
    prefill: _Prefill
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class StreamWatch:
    """The traced rows of one stream. `rank` is that of the worker."""

    tracer: Tracer
    rank: int
    _open: dict[int, _Prefill] = field(default_factory=dict)
    _in_flight: dict[int, list[_Chunk]] = field(default_factory=dict)

    async def passing(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Passes requests on, and looks at each before."""
        async for request in requests:
            if self._open or has_traces(request):
                outline = outline_of(request)
                if outline is not None:
                    self._sent(outline)
            yield request

    def see_response(self, response: Any) -> None:
        """Looks at a response before it is sent."""
        if not self._in_flight:
            return
        answer = answer_of(response)
        if answer is not None:
            self._answered(*answer)

    def close(self) -> None:
        """Ends the spans of all rows with the stream."""
        for row in list(self._open):
            self._end(row, "stream ended")

    def _sent(self, step: StepOutline) -> None:
        for row in step.released:
            self._end(row, "released")
        for row, traceparent in step.traced.items():
            self._end(row, "released")
            self._open[row] = _Prefill(self._start(traceparent))
        chunks = [
            _Chunk(row, self._open[row], num_tokens, row in step.sampling)
            for row, num_tokens in step.computed.items()
            if row in self._open
        ]
        if chunks:
            self._in_flight[step.step_id] = chunks

    def _answered(self, step_id: int, model_us: int) -> None:
        for chunk in self._in_flight.pop(step_id, ()):
            chunk.prefill.num_steps += 1
            chunk.prefill.num_tokens += chunk.num_tokens
            chunk.prefill.in_model_us += model_us
            if chunk.samples and self._open.get(chunk.row) is chunk.prefill:
                self._end(chunk.row, "sampled")

    def _start(self, traceparent: str) -> Span:
        return self.tracer.start(_NAME, TraceContext(traceparent), {"quire.rank": self.rank})

    def _end(self, row: int, outcome: str) -> None:
        prefill = self._open.pop(row, None)
        if prefill is None:
            return
        prefill.span.set(
            {
                "quire.outcome": outcome,
                "quire.steps": prefill.num_steps,
                "quire.computed_tokens": prefill.num_tokens,
            }
        )
        # Ranks other than the first report no times.
        if prefill.in_model_us:
            prefill.span.set({"gen_ai.latency.time_in_model_forward": prefill.in_model_us / 1e6})
        prefill.span.end()
