"""The gateway's span of each request: from its arrival in the generator to its last event.

Names come from OpenTelemetry's conventions for generative AI, or from vLLM if the conventions have none. A span has
neither prompt nor output, and only the codes of errors, since their texts may quote what the client sent.
"""

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from gateway.replicas.generation_request import GenerationRequest
from gateway.replicas.live import LiveRequest
from quire.rpc.errors import QuireError
from quire.runtime import clock
from quire.tracing import AttributeValue, Span, TraceContext, Tracer

_incoming: ContextVar[TraceContext | None] = ContextVar("trace context", default=None)
# The codes of a gRPC server's own faults, by OpenTelemetry's conventions.
_OUR_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")


def set_incoming_context(headers: Iterable[tuple[str, str]]) -> None:
    """Reads the trace context of the current call from its headers. It belongs to the task of the call."""
    _incoming.set(TraceContext.from_headers(headers))


class RequestSpan:
    """The span of a call for one request, which ends with its context and records its result. Without a tracer there
    is no span, and nothing is recorded."""

    def __init__(self, tracer: Tracer | None, model_name: str, operation: str) -> None:
        """Starts the span in the trace of the current call."""
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model_name,
            "gen_ai.response.model": model_name,
        }
        self._span: Span | None = None
        if tracer is not None:
            self._span = tracer.start(f"{operation} {model_name}", _incoming.get(), attributes)
        self._started_at = clock.monotonic()
        self._live: LiveRequest | None = None

    @property
    def context(self) -> TraceContext | None:
        """The trace context for the scheduler, which continues the span."""
        return None if self._span is None else self._span.context

    def opened(self, live: LiveRequest) -> None:
        """Records that the request was accepted."""
        self._live = live
        if self._span is None:
            return
        if self._span.is_recording:
            self._span.set(_request_attributes(live.request))
        if live.request.trace is not None and live.request.trace != self.context:
            # A durable request continues the trace in which it began; this call belongs to its own.
            self._span.link(live.request.trace)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is None:
            return
        if self._span.is_recording:
            if self._live is not None:
                self._span.set(_result_attributes(self._live))
            latency_s = clock.monotonic() - self._started_at
            self._span.set({"quire.outcome": _outcome(error), "gen_ai.latency.e2e": latency_s})
            if isinstance(error, QuireError):
                self._span.set({"error.type": error.reason, "rpc.grpc.status_code": error.code.value[0]})
                if error.code.name in _OUR_FAULTS:
                    self._span.fail(f"{error.code.name}: {error.reason}")
            elif isinstance(error, Exception):
                self._span.set({"error.type": type(error).__qualname__})
                self._span.fail("UNEXPECTED")
        self._span.end()


def _request_attributes(request: GenerationRequest) -> dict[str, AttributeValue]:
    """The request with all defaults, without its content."""
    names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "n")
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": request.stopping.max_tokens,
        **{f"gen_ai.request.{name}": getattr(request.sampling, name) for name in names},
        "gen_ai.request.sampling.best_of": request.sampling.best_of,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        "quire.tenant": request.tenant,
        "quire.priority": request.priority,
        "quire.durable": request.durable,
    }


def _result_attributes(live: LiveRequest) -> dict[str, AttributeValue]:
    reasons = [stream.finished.reason.value for stream in live.sequences if stream.finished is not None]
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.output_tokens": live.num_generated_tokens,
        "quire.submissions": live.submissions,
    }
    if live.usage is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = live.usage.cached_tokens
        attributes["gen_ai.usage.reasoning.output_tokens"] = live.usage.reasoning_tokens
    if reasons:
        attributes["gen_ai.response.finish_reasons"] = reasons
    if live.seconds_to_first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = live.seconds_to_first_token
    return attributes


def _outcome(error: BaseException | None) -> str:
    """The outcome as in the metrics: completed, abandoned by the client, or the status of the error."""
    if error is None:
        return "completed"
    if isinstance(error, QuireError):
        return error.code.name.lower()
    return "abandoned" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "internal"
