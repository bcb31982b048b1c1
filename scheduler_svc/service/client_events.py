"""What happened to a client's requests, taken apart and put together."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from scheduler_svc.core.events import ClientEvents, RequestFailure
from scheduler_svc.core.request import Handle, RequestKey


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


def select(events: ClientEvents, places: Sequence[int], handles: list[Handle]) -> ClientEvents:
    """The tokens at these places, in rising order, as those of other handles, one for each. The ends are left out."""
    part = ClientEvents(
        handles,
        [events.sequence_indices[place] for place in places],
        [events.offsets[place] for place in places],
        [events.token_ids[place] for place in places],
    )
    if events.with_logprobs:
        positions = {place: position for position, place in enumerate(events.with_logprobs)}
        part.with_logprobs = [new for new, place in enumerate(places) if place in positions]
        taken = [positions[places[new]] for new in part.with_logprobs]
        part.logprobs.append(events.logprobs.columns().take(np.array(taken, np.int64)))
    return part


def under(events: ClientEvents, key: RequestKey) -> ClientEvents:
    """A copy of one request's events, as one who knows it by another key gets them."""
    return ClientEvents(
        [key.handle] * len(events.handles),
        list(events.sequence_indices),
        list(events.offsets),
        list(events.token_ids),
        list(events.with_logprobs),
        events.logprobs.copy(),
        [end._replace(handle=key.handle) for end in events.finished],
        [end._replace(handle=key.handle) for end in events.completed],
        [RequestFailure(key, failure.reason, failure.message) for failure in events.failed],
    )
