"""What happened to a client's requests, taken apart and put together."""

from dataclasses import replace

from scheduler_svc.core.logprobs import PositionLogprobs
from scheduler_svc.core.request import Handle, RequestKey
from scheduler_svc.core.step_plan import ClientEvents, RequestFailure


def by_request(events: ClientEvents) -> dict[Handle, ClientEvents]:
    """The events of one client, request by request, in order."""
    parts: dict[Handle, ClientEvents] = {}

    def part_of(handle: Handle) -> ClientEvents:
        return parts.setdefault(handle, ClientEvents())

    logprobs: dict[int, PositionLogprobs] = dict(events.logprobs)
    for event, handle in enumerate(events.handles):
        part = part_of(handle)
        if event in logprobs:
            part.logprobs.append((len(part.handles), logprobs[event]))
        part.handles.append(handle)
        part.sequence_indices.append(events.sequence_indices[event])
        part.offsets.append(events.offsets[event])
        part.token_ids.append(events.token_ids[event])
    for finished in events.finished:
        part_of(finished.handle).finished.append(finished)
    for completed in events.completed:
        part_of(completed.handle).completed.append(completed)
    for failure in events.failed:
        part_of(failure.key.handle).failed.append(failure)
    return parts


def append(kept: ClientEvents, new: ClientEvents) -> None:
    """Adds what happened later."""
    before = len(kept.handles)
    kept.logprobs += [(before + event, logprobs) for event, logprobs in new.logprobs]
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
        list(events.logprobs),
        [replace(end, handle=key.handle) for end in events.finished],
        [replace(end, handle=key.handle) for end in events.completed],
        [RequestFailure(key, failure.reason, failure.message) for failure in events.failed],
    )
