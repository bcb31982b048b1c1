"""The scheduler's span of each request: from its submission to its end, with all that happened between as events.

The core keeps a request's times anyway (`Timeline`); they are read once, when it is over. So tracing costs nothing
while a request runs. Names are vLLM's where they have the same meaning.
"""

import time
from collections.abc import Callable, Mapping

from quire.rpc.errors import QuireError
from quire.tracing import AttributeValue, Span, TraceContext, Tracer
from scheduler_svc.core.events import ClientEvents, RequestFailure
from scheduler_svc.core.request import ClientId, Request, RequestKey
from scheduler_svc.core.sequence import Milestone, SequenceGroup

_NAME = "schedule"
_EVENTS: Mapping[Milestone, tuple[str, dict[str, AttributeValue] | None]] = {
    Milestone.SWAPPED_OUT: ("preempted", {"quire.preemption.mode": "swap"}),
    Milestone.RECOMPUTED: ("preempted", {"quire.preemption.mode": "recompute"}),
    Milestone.WORKER_LOST: ("worker lost", None),
    Milestone.RESUMED: ("resumed", None),
}


class RequestSpans:
    """The spans of all live requests that are traced. Without a tracer there are none, ever.

    `clock` is the one whose seconds the core is given; `now_ns` tells nanoseconds since 1970.
    """

    def __init__(
        self, tracer: Tracer | None, clock: Callable[[], float], now_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._tracer = tracer
        self._clock = clock
        self._now_ns = now_ns
        self._live: dict[RequestKey, tuple[Span, SequenceGroup]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def start(self, request: Request, parent: TraceContext | None) -> Span | None:
        """The span of a request that came. None for one that no gateway traces, or that is not sampled."""
        if self._tracer is None or parent is None:
            return None
        span = self._tracer.start(_NAME, parent, _asked(request))
        return span if span.is_recording else None

    def queued(self, span: Span, group: SequenceGroup) -> None:
        """The request waits from now on."""
        self._live[group.request.key] = span, group

    def refused(self, span: Span, error: Exception) -> None:
        """The request was not taken."""
        reason = error.reason if isinstance(error, QuireError) else type(error).__qualname__
        span.set({"quire.outcome": "refused", "error.type": reason})
        span.end()

    def delivered(self, events: Mapping[ClientId, ClientEvents]) -> None:
        """What a step meant for each client. The only call that comes with every step."""
        if not self._live:
            return
        for client, batch in events.items():
            for end in batch.completed:
                self._end(RequestKey(client, end.handle), "completed")
            for failure in batch.failed:
                self._end(failure.key, "failed", failure)

    def aborted(self, key: RequestKey) -> None:
        """Whoever wanted it does not any more. No effect where it is over."""
        self._end(key, "aborted")

    def sequence_aborted(self, key: RequestKey) -> None:
        """One of its sequences was ended; where that was the last one, so is the request."""
        entry = self._live.get(key)
        if entry is not None and entry[1].finished:
            self._end(key, "aborted")

    def close(self) -> None:
        """This scheduler stops; what is live goes on in another one, in a span of its own."""
        for key in list(self._live):
            self._end(key, "left")
        if self._tracer is not None:
            self._tracer.close()

    def _end(self, key: RequestKey, outcome: str, failure: RequestFailure | None = None) -> None:
        entry = self._live.pop(key, None)
        if entry is None:
            return
        span, group = entry
        for name, at, attributes in _events_of(group):
            span.event(name, self._ns(at), attributes)
        span.set(_came_of(group, self._clock()) | {"quire.outcome": outcome})
        if failure is not None:
            span.set({"error.type": failure.reason})
            span.fail(failure.reason)
        span.end()

    def _ns(self, at: float) -> int:
        """A time of the core's clock, as nanoseconds since 1970."""
        return self._now_ns() - round((self._clock() - at) * 1e9)


def _asked(request: Request) -> dict[str, AttributeValue]:
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.usage.input_tokens": len(request.prompt),
        "quire.emitted_tokens": sum(len(each.token_ids) for each in request.emitted),
        "quire.priority": request.priority,
    }


def _events_of(group: SequenceGroup) -> list[tuple[str, float, Mapping[str, AttributeValue] | None]]:
    line = group.timeline
    events: list[tuple[str, float, Mapping[str, AttributeValue] | None]] = [("queued", line.arrived, None)]
    if line.started is not None:
        events.append(("scheduled", line.started, {"quire.cached_tokens": group.cached_tokens or 0}))
    if (first_token := _first_token_of(group)) is not None:
        events.append(("first token", first_token, None))
    for milestone, at in line.milestones:
        name, attributes = _EVENTS[milestone]
        events.append((name, at, attributes))
    return sorted(events, key=lambda event: event[1])


def _came_of(group: SequenceGroup, now: float) -> dict[str, AttributeValue]:
    """Times are seconds. The time in the model is that from the first step on, preemptions included, as vLLM has it."""
    line = group.timeline
    generated = sum(each.num_output_tokens for each in group.sequences)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.output_tokens": generated if group.beams is None else group.beams.num_generated,
        "quire.cached_tokens": group.cached_tokens or 0,
        "quire.preemptions": group.preemptions,
        "gen_ai.latency.e2e": now - line.arrived,
    }
    if line.started is not None:
        attributes["gen_ai.latency.time_in_queue"] = line.started - line.arrived
        attributes["gen_ai.latency.time_in_model_inference"] = now - line.started
    first_token = _first_token_of(group)
    if line.started is not None and first_token is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first_token - line.arrived
        attributes["gen_ai.latency.time_in_model_prefill"] = first_token - line.started
        attributes["gen_ai.latency.time_in_model_decode"] = now - first_token
    return attributes


def _first_token_of(group: SequenceGroup) -> float | None:
    """None also where an earlier scheduler made it."""
    return None if group.request.emitted else group.timeline.first_token
