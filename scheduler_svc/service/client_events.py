"""What happened to a client's requests, taken apart and put together."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from scheduler_svc.core.request import Handle, RequestKey
from scheduler_svc.core.step_plan import ClientEvents, RequestFailure


def by_request(events: ClientEvents) -> dict[Handle, ClientEvents]:
    """The events of one client, request by request, in order."""
    parts: dict[Handle, ClientEvents] = {}

    def part_of(handle: Handle) -> ClientEvents:
        return parts.setdefault(handle, ClientEvents())

    columns = events.logprobs.columns() if events.with_logprobs else None
    for handle, begin, end in _runs(events.handles):
        part = part_of(handle)
        if columns is not None:
            first, last = bisect_left(events.with_logprobs, begin), bisect_left(events.with_logprobs, end)
            shift = len(part.handles) - begin
            part.with_logprobs += [event + shift for event in events.with_logprobs[first:last]]
            part.logprobs.append(columns.part(first, last))
        part.handles += events.handles[begin:end]
        part.sequence_indices += events.sequence_indices[begin:end]
        part.offsets += events.offsets[begin:end]
        part.token_ids += events.token_ids[begin:end]
    for finished in events.finished:
        part_of(finished.handle).finished.append(finished)
    for completed in events.completed:
        part_of(completed.handle).completed.append(completed)
    for failure in events.failed:
        part_of(failure.key.handle).failed.append(failure)
    return parts


def _runs(handles: list[Handle]) -> Iterator[tuple[Handle, int, int]]:
    """Stretches of equal handles: whose, from where, to where."""
    begin = 0
    for handle, stretch in groupby(handles):
        end = begin + sum(1 for _ in stretch)
        yield handle, begin, end
        begin = end


def append(kept: ClientEvents, new: ClientEvents) -> None:
    """Adds what happened later."""
    before = len(kept.handles)
    kept.with_logprobs += [before + event for event in new.with_logprobs]
    kept.logprobs.extend(new.logprobs)
    kept.handles += new.handles
    kept.sequence_indices += new.sequence_indices
    kept.offsets += new.offsets
    kept.token_ids += new.token_ids
    kept.finished += new.finished
    kept.completed += new.completed
    kept.failed += new.failed


def under(events: ClientEvents, key: RequestKey) -> ClientEvents:
    """A copy of one request's events, as one who knows it by another key gets them."""
    return ClientEvents(
        [key.handle] * len(events.handles),
        list(events.sequence_indices),
        list(events.offsets),
        list(events.token_ids),
        list(events.with_logprobs),
        events.logprobs.copy(),
        [replace(end, handle=key.handle) for end in events.finished],
        [replace(end, handle=key.handle) for end in events.completed],
        [RequestFailure(key, failure.reason, failure.message) for failure in events.failed],
    )
