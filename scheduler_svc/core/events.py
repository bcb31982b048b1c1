"""Collects what a step's result meant for each client."""

from scheduler_svc.core.request import ClientId
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup
from scheduler_svc.core.step_plan import ClientEvents, PositionLogprobs, RequestEnd, RequestFailure, SequenceEnd, Usage


class EventLog:
    """The events of one step, by client."""

    def __init__(self) -> None:
        self.by_client: dict[ClientId, ClientEvents] = {}

    def token(self, sequence: Sequence, token_id: int, logprobs: PositionLogprobs | None) -> None:
        """The sequence's newest token."""
        key = sequence.request.key
        events = self._of(key.client)
        if logprobs is not None:
            events.logprobs.append((len(events.token_ids), logprobs))
        events.handles.append(key.handle)
        events.sequence_indices.append(sequence.index)
        events.offsets.append(sequence.num_output_tokens - 1)
        events.token_ids.append(token_id)

    def sequence_end(self, sequence: Sequence, reason: FinishReason) -> None:
        key = sequence.request.key
        stop_token_id = sequence.token_ids[-1] if reason is FinishReason.STOP else None
        end = SequenceEnd(key.handle, sequence.index, sequence.num_output_tokens, reason, stop_token_id)
        self._of(key.client).finished.append(end)

    def request_end(self, group: SequenceGroup) -> None:
        key = group.request.key
        self._of(key.client).completed.append(RequestEnd(key.handle, usage_of(group)))

    def request_failure(self, group: SequenceGroup, reason: str, message: str) -> None:
        key = group.request.key
        self._of(key.client).failed.append(RequestFailure(key, reason, message))

    def _of(self, client: ClientId) -> ClientEvents:
        events = self.by_client.get(client)
        if events is None:
            events = self.by_client[client] = ClientEvents()
        return events


def usage_of(group: SequenceGroup) -> Usage:
    """What a finished group cost."""
    line = group.timeline
    started = line.arrived if line.started is None else line.started
    first = started if line.first_token is None else line.first_token
    last = first if line.last_token is None else line.last_token
    return Usage(
        prompt_tokens=len(group.request.prompt),
        cached_tokens=group.cached_tokens or 0,
        generated_tokens=sum(sequence.num_output_tokens for sequence in group.sequences),
        preemptions=group.preemptions,
        queue_s=started - line.arrived,
        prefill_s=first - started,
        decode_s=last - first,
    )
