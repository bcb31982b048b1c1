"""Tracing: the span of each request (OpenTelemetry), and the parts of each step (`--trace-steps`)."""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from quire.rpc.errors import QuireError
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError
from quire.tracing import AttributeValue, Span, TraceContext, Tracer
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RequestKey
from scheduler_svc.core.sequence import Milestone, SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestFailure, StepPlan, StepWork
from scheduler_svc.service.requests import GATEWAYS

_logger = logging.getLogger(__name__)

_SPAN_NAME = "schedule"
_EVENTS: Mapping[Milestone, tuple[str, dict[str, AttributeValue] | None]] = {
    Milestone.SWAPPED_OUT: ("preempted", {"quire.preemption.mode": "swap"}),
    Milestone.RECOMPUTED: ("preempted", {"quire.preemption.mode": "recompute"}),
    Milestone.WORKER_LOST: ("worker lost", None),
    Milestone.RESUMED: ("resumed", None),
}

_SCHEDULER, _GATEWAYS, _WORKER = 1, 2, 3
_TRACK_NAMES = {_SCHEDULER: "scheduler", _GATEWAYS: "gateway streams", _WORKER: "worker"}
_WORKER_PARTS = ("queue", "cache operations", "model", "sample")
_SIZES = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_host_blocks")
_SIZES += ("full_groups", "windowed_groups", "window", "state_blocks")
_TRACKS = {"plan": _SCHEDULER, "send": _SCHEDULER, "apply": _SCHEDULER, "emit": _GATEWAYS}
_TRACKS |= dict.fromkeys(_WORKER_PARTS, _WORKER)


class RequestSpans:
    """The spans of all live requests that are traced, from submission to end; none without a tracer.

    The core keeps a request's times anyway (`Timeline`). They are read once, at the end of the request, so tracing
    costs nothing while it runs. Names are vLLM's if they have the same meaning. `clock` is the core's, in seconds;
    `now_ns` returns nanoseconds since 1970.
    """

    def __init__(
        self, tracer: Tracer | None, clock: Callable[[], float], now_ns: Callable[[], int] = clock.unix_ns
    ) -> None:
        self._tracer = tracer
        self._clock = clock
        self._now_ns = now_ns
        self._live: dict[RequestKey, tuple[Span, SequenceGroup]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def submit(
        self, request: Request, parent: TraceContext | None, submit: Callable[[Request], SequenceGroup]
    ) -> SequenceGroup:
        """Submits a request by `submit`, and begins its span if its gateway traces it and it is sampled."""
        if self._tracer is None or parent is None:
            return submit(request)
        span = self._tracer.start(_SPAN_NAME, parent, _attributes_of(request))
        if not span.is_recording:
            return submit(request)
        try:
            group = submit(replace(request, traceparent=span.context.traceparent))
        except Exception as error:
            reason = error.reason if isinstance(error, QuireError) else type(error).__qualname__
            span.set({"quire.outcome": "refused", "error.type": reason})
            span.end()
            raise
        self._live[request.key] = span, group
        return group

    def delivered(self, events: ClientEvents) -> None:
        """Ends the spans of requests that a step ended. The only call that comes with every step."""
        if not self._live:
            return
        for end in events.completed:
            self._end(RequestKey(GATEWAYS, end.handle), "completed")
        for failure in events.failed:
            self._end(failure.key, "failed", failure)

    def aborted(self, key: RequestKey) -> None:
        """The request was ended from outside. No effect if it has ended already."""
        self._end(key, "aborted")

    def sequence_aborted(self, key: RequestKey) -> None:
        """A sequence of the request was ended from outside, and the request with its last one."""
        entry = self._live.get(key)
        if entry is not None and not entry[1].unfinished:
            self._end(key, "aborted")

    def close(self) -> None:
        """The scheduler stops. Live requests continue in another one, in a separate span."""
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
        span.set(_results_of(group, self._clock()) | {"quire.outcome": outcome})
        if failure is not None:
            span.set({"error.type": failure.reason})
            span.fail(failure.reason)
        span.end()

    def _ns(self, at: float) -> int:
        """Converts a time of the core's clock to nanoseconds since 1970."""
        return self._now_ns() - round((self._clock() - at) * 1e9)


def _attributes_of(request: Request) -> dict[str, AttributeValue]:
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


def _results_of(group: SequenceGroup, now: float) -> dict[str, AttributeValue]:
    """Times are in seconds. As in vLLM, the time in the model begins with the first step and includes preemptions."""
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
    """The time of the first token; None if it is not known, because an earlier scheduler generated it."""
    return None if group.request.emitted else group.timeline.first_token


class StepTrace:
    """Records the parts of each step and their times, in a file that Chrome's tracing page and Perfetto open.

    Tracks are the scheduler (plan, send, apply), the gateways' streams (emit) and the worker (queue, cache operations,
    model, sample). The worker reports only durations: its events are drawn to end when the result was received, so they
    are late by the transmission time of the result. Each line holds one event. The format allows the end of the list to
    be missing, so even a truncated file (kill -9) opens. Times are seconds of one monotonic clock. If the trace cannot
    continue, as on a full disk, it ends with one line in the log.
    """

    def __init__(self, file: TextIO | None) -> None:
        """`file` is None to trace nothing."""
        self._file = file
        self._append("[\n")
        for track, name in _TRACK_NAMES.items():
            self._write({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}})

    @classmethod
    def open(cls, path: str | None) -> "StepTrace":
        """Opens the trace's file. Raises ConfigurationError if it cannot be written."""
        if path is None:
            return cls(None)
        try:
            return cls(Path(path).open("w", encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--trace-steps {path}: {error.strerror}") from error

    def attached(self, config: SchedulerConfig, vocab_size: int) -> None:
        """Workers were attached: records the core's limits, for models of this replica (`quire simulate`)."""
        sizes = {name: getattr(config, name) for name in _SIZES}
        self._write({"name": "replica", "ph": "M", "pid": 1, "args": {**sizes, "vocab_size": vocab_size}})

    def planned(self, plan: StepPlan, start: float, end: float) -> None:
        """A step was planned; the trace gets its amounts of work."""
        if self._file is not None:
            self.part("plan", plan.step_id, start, end, **asdict(StepWork.of(plan)))

    def part(self, name: str, step_id: int, start: float, end: float, **details: int) -> None:
        """Records a part of a step; `name` is a key of `_TRACKS`."""
        if self._file is not None:
            times = {"ts": round(start * 1e6, 1), "dur": round((end - start) * 1e6, 1)}
            place = {"name": name, "ph": "X", "pid": 1, "tid": _TRACKS[name]}
            self._write({**place, **times, "args": {"step": step_id, **details}})

    def answered(self, step_id: int, worker_us: tuple[int, int, int, int], received: float) -> None:
        """Records the worker's parts. `worker_us` are the microseconds of queue, cache operations, model and sample."""
        start = received - sum(worker_us) / 1e6
        for name, duration_us in zip(_WORKER_PARTS, worker_us, strict=True):
            end = start + duration_us / 1e6
            self.part(name, step_id, start, end)
            start = end

    def close(self) -> None:
        # A JSON list must not end with a comma.
        self._append('{"name":"end","ph":"M","pid":1,"args":{}}\n]\n', is_last=True)

    def _write(self, event: dict[str, object]) -> None:
        if self._file is not None:
            self._append(json.dumps(event, separators=(",", ":")) + ",\n")

    def _append(self, text: str, *, is_last: bool = False) -> None:
        file = self._file
        if file is None:
            return
        if is_last:
            self._file = None
        try:
            file.write(text)
            if is_last:
                file.close()
        except OSError as error:
            _logger.warning("the trace of steps %s ends here: %s", file.name, error.strerror)
            self._file = None
            # Closing tries to write the buffered rest.
            with suppress(OSError):
                file.close()
