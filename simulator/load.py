"""Converts loads of `quire.load` to arrivals for the engine, and results to records for reports of `quire.load`."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from quire.load import LoadRequest, RequestRecord, conversations
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.request import Request, RowSampling
from simulator.engine import Life, Simulation, key_of
from simulator.tokens import TOKEN_ID

_UNSENT = "EARLIER_TURN_FAILED"
"""The reason under which `quire bench` counts it."""


class LoadArrivals:
    """The requests of a load in order of time, as the load generator of `quire bench` sends them.

    A conversation is a run of turns. A turn arrives when the one before it has ended, with the history as it was
    answered; turns after a failed one are not sent. Without times of arrival all arrive at the start.
    """

    def __init__(
        self,
        load: Iterable[LoadRequest],
        *,
        max_concurrency: int | None = None,
        is_closed: bool = False,
        duration_s: float | None = None,
        num_tenants: int = 1,
        on_end: Callable[[int, int], None] | None = None,
    ) -> None:
        """Args:
        max_concurrency: Maximum number of live conversations; None is no limit.
        is_closed: A conversation arrives when there is room for it, whatever its time of arrival.
        duration_s: Nothing is sent after it.
        num_tenants: Number of tenants that requests are assigned to, in turn.
        on_end: Gets the numbers of requests that have ended and that have failed, whenever one ends.
        """
        self.sent: list[LoadRequest] = []
        """By the engine's numbers."""
        self.unsent: list[RequestRecord] = []
        """Turns after one that failed."""
        self._conversations = map(deque, conversations(load))
        self._next = next(self._conversations, None)
        # Following turns: their time, and the rest of their conversation.
        self._following: list[tuple[float, int, deque[LoadRequest]]] = []
        self._left: dict[int, deque[LoadRequest]] = {}
        self._num_live = 0
        self._freed_at = 0.0
        self._max_concurrency = max_concurrency
        self._is_closed = is_closed
        self._duration_s = math.inf if duration_s is None else duration_s
        self._num_tenants = num_tenants
        self._on_end = on_end
        self._num_ended = self._num_failed = 0

    def next_at(self) -> float | None:
        """Raises ValueError if the next request has no length in tokens."""
        first, following = self._first_at(), self._following[0][0] if self._following else None
        return first if following is None else following if first is None else min(first, following)

    def next_request(self) -> Request:
        first = self._first_at()
        if self._following and (first is None or self._following[0][0] <= first):
            turns = heapq.heappop(self._following)[2]
        else:
            assert self._next is not None, "there is a next request"
            turns, self._next = self._next, next(self._conversations, None)
            self._num_live += 1
        request = turns.popleft()
        number = len(self.sent)
        self.sent.append(request)
        self._left[number] = turns
        return _core_request(number, request, tenant=str(request.index % self._num_tenants))

    def record_end(self, index: int, now: float, *, failed: bool) -> None:
        self._num_ended += 1
        self._num_failed += failed
        if self._on_end is not None:
            self._on_end(self._num_ended, self._num_failed)
        turns, request = self._left.pop(index), self.sent[index]
        if failed:
            self.unsent += [RequestRecord(turn.index, now, None, now, error=_UNSENT) for turn in turns]
        elif turns:
            due = now + turns[0].delay_s
            if due < self._duration_s:
                turns[0] = turns[0].carrying(request.token_ids, [TOKEN_ID] * (request.output_len or 0))
                heapq.heappush(self._following, (due, turns[0].index, turns))
                return
        self._num_live -= 1
        self._freed_at = now

    def _first_at(self) -> float | None:
        """When the next conversation begins; None if there is no room for it, or none is left."""
        if self._next is None or (self._max_concurrency is not None and self._num_live >= self._max_concurrency):
            return None
        due = self._freed_at if self._is_closed else self._next[0].arrival_s or 0.0
        if max(due, self._freed_at if self._max_concurrency is not None else 0.0) >= self._duration_s:
            self._next = None
            return None
        return due


def check_simulated(request: LoadRequest) -> int:
    """The length of the output. Raises ValueError if a length is not known in tokens."""
    _ = request.token_ids
    if request.output_len is None:
        raise ValueError(
            f"request {request.index + 1} leaves its end to the model; a simulation needs the length of the output "
            "(output_len, or --output-len)"
        )
    return request.output_len


def _core_request(number: int, request: LoadRequest, tenant: str) -> Request:
    output_len = check_simulated(request)
    width = request.beam_width or request.n
    return Request(
        key_of(number),
        str(request.index),
        request.token_ids.tolist(),
        RowSampling(seed=request.index),
        output_len,
        tenant=tenant,
        num_sequences=width,
        num_returned=request.n,
        beam=None if request.beam_width is None else BeamParameters(request.beam_width),
    )


def records(simulation: Simulation, arrivals: LoadArrivals, frontend_latency_s: float = 0.0) -> list[RequestRecord]:
    """The results of all requests, in order of the load. `frontend_latency_s` is the time that clients, gateways and
    the network add to each answer."""
    pairs = zip(simulation.lives, arrivals.sent, strict=True)
    known = [_record(life, request, frontend_latency_s) for life, request in pairs] + arrivals.unsent
    return sorted(known, key=lambda record: record.index)


def _record(life: Life, request: LoadRequest, added_s: float) -> RequestRecord:
    assert life.ended is not None, "every request has ended"
    chunks = [np.unique(times, return_counts=True) for times in life.token_times]
    times = np.concatenate([each for each, _ in chunks])
    counts = np.concatenate([each for _, each in chunks])
    sequences = np.repeat(np.arange(len(chunks)), [len(each) for each, _ in chunks])
    order = np.argsort(times, kind="stable")
    usage = life.usage
    return RequestRecord(
        index=request.index,
        arrival_s=life.arrived,
        sent_s=life.sent,
        end_s=life.ended + added_s,
        chunk_times_s=times[order] + added_s,
        chunk_tokens=counts[order].astype(np.int32),
        chunk_sequences=sequences[order].astype(np.int32),
        prompt_tokens=len(life.request.prompt),
        cached_tokens=None if usage is None else usage.cached_tokens,
        preemptions=None if usage is None else usage.preemptions,
        error=life.reason,
    )
