"""Readers of requests: a gateway's stream reads a request, and gets its events.

A stream that breaks loses its requests' events. So a request without a reader, and a durable request always, keeps its
events in its history, and a later reader gets the rest from there.
"""

from asyncio import TimerHandle, get_running_loop
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from scheduler_svc.core.request import Handle, Request, RequestKey
from scheduler_svc.core.step import ClientEvents
from scheduler_svc.service.history import History, PromptLogprobs, add_end, ends_of, select, split_by_request
from scheduler_svc.service.outbox import Outbox

MAX_GROWTH = 1024
"""Output tokens for which room is reserved, for each sequence of a running durable request, beyond its present ones.
Tokens beyond the reserved ones are kept too, and leave less room for new requests."""

CallLater = Callable[[float, Callable[[], object]], TimerHandle]


def call_later(seconds: float, call: Callable[[], object]) -> TimerHandle:
    """Schedules a call in the running event loop."""
    return get_running_loop().call_later(seconds, call)


@dataclass(slots=True, eq=False)
class Connection:
    """One stream of a gateway, and the requests that it reads, by its handles for them. Handles in `reused` were used
    for other requests before, in messages that may still be on their way."""

    gateway_id: str
    grace_period_s: float
    outbox: Outbox = field(default_factory=Outbox)
    reads: dict[Handle, "OwnedRequest"] = field(default_factory=dict)
    reused: set[Handle] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Reader:
    """The stream that gets a request's events, and the handle that it knows the request by."""

    connection: Connection
    handle: Handle

    @property
    def request(self) -> "OwnedRequest | None":
        """The request that has this handle on the stream."""
        return self.connection.reads.get(self.handle)


@dataclass(frozen=True, slots=True)
class Durable:
    """The original submission of a durable request, and its charge in tokens. A log probability counts as a token."""

    description: bytes
    prompt_charge: int
    charge_per_token: int
    num_sequences: int
    max_tokens: int
    """The max_tokens of each sequence."""

    @classmethod
    def from_request(cls, request: Request, description: bytes) -> "Durable":
        sampling = request.sampling
        per_prompt = 1 if sampling.prompt_logprobs is None else 2 + sampling.prompt_logprobs
        per_token = 1 if sampling.logprobs is None else 2 + sampling.logprobs
        prompt_charge = len(request.prompt) * per_prompt
        return cls(description, prompt_charge, per_token, request.num_returned, request.max_tokens)

    def charge(self, num_output_tokens: int, *, is_over: bool) -> int:
        """The tokens that count: these output tokens, and while it runs the tokens that may soon follow."""
        growth = 0 if is_over else self.num_sequences * MAX_GROWTH
        num_tokens = min(num_output_tokens + growth, self.num_sequences * self.max_tokens)
        return self.prompt_charge + num_tokens * self.charge_per_token


@dataclass(slots=True, eq=False)
class OwnedRequest:
    """One request.

    Attributes:
        nonce: Distinguishes requests with the same id.
        gateway_id: The gateway that submitted it.
        retention_s: Seconds that it waits for a reader.
        durable: None if the request is not durable.
        end_of_prompt_logprobs: The first position of the prompt whose log probability was not computed yet.
        is_offer: Whether it only waits for room here, and continues as another submission.
        comes_in_parts: Whether a later reader may get the output in parts. It needs the output as a whole if sequences
            are selected at the end, and log probabilities of the prompt before everything else.
        history: All events of a durable request, and the unread events of another.
    """

    key: RequestKey
    tenant: str
    request_id: str
    nonce: int
    gateway_id: str
    retention_s: float
    durable: Durable | None
    end_of_prompt_logprobs: int
    is_offer: bool = False
    comes_in_parts: bool = False
    history: History = field(default_factory=History)
    reader: Reader | None = None
    is_over: bool = False
    expiry: TimerHandle | None = None

    @property
    def keeps_events(self) -> bool:
        return self.durable is not None or self.reader is None

    @property
    def charge(self) -> int:
        """The tokens that a durable request counts towards the limit."""
        assert self.durable is not None
        return self.durable.charge(self.history.num_tokens, is_over=self.is_over)

    def stop_timer(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


def keep(events: ClientEvents, requests: Mapping[Handle, OwnedRequest]) -> None:
    """Adds events to the histories of these requests, by their handle in the events."""
    if events.with_logprobs:
        places = [place for place, handle in enumerate(events.handles) if handle in requests]
        chosen = select(events, places, [events.handles[place] for place in places])
        for handle, part in split_by_request(chosen).items():
            requests[handle].history.add(part)
    else:
        columns = (events.handles, events.sequence_indices, events.offsets, events.token_ids)
        for handle, index, offset, token_id in zip(*columns, strict=True):
            if (owned := requests.get(handle)) is not None:
                owned.history.add_token(index, offset, token_id)
    for handle, end in ends_of(events):
        if (owned := requests.get(handle)) is not None:
            owned.history.add_end(end)


class Delivery:
    """Puts the events of steps into the outboxes of their readers, and into histories.

    Attributes:
        readers: The reader of each request that gets its events at once, by the request's handle in the core. A reader
            that is being sent a replay is not here.
        kept: The requests whose events are kept.
    """

    def __init__(self) -> None:
        self.readers: dict[Handle, Reader] = {}
        self.kept: dict[Handle, OwnedRequest] = {}

    def deliver(self, step_id: int, events: ClientEvents) -> None:
        """Hands out the events of a step. Never waits."""
        if self.kept:
            keep(events, self.kept)
        for connection, part in self._by_connection(events).items():
            connection.outbox.put(step_id, part)

    def deliver_prompt_logprobs(
        self, entries: Iterable[PromptLogprobs], requests: Mapping[Handle, OwnedRequest]
    ) -> None:
        """Hands out log probabilities of prompts, once even if they are computed again. Called before `deliver` for
        the same step. Never waits."""
        for entry in entries:
            owned = requests.get(entry.handle)
            if owned is None or (new := entry.since(owned.end_of_prompt_logprobs)) is None:
                continue
            if new.first_position > owned.end_of_prompt_logprobs:
                # Positions between them were not finite: the request fails, or its prompt is computed again.
                continue
            owned.end_of_prompt_logprobs = new.end
            if owned.keeps_events:
                owned.history.add_prompt_logprobs(new)
            if owned.reader is not None:
                owned.reader.connection.outbox.put_prompt_logprobs([replace(new, handle=owned.reader.handle)])

    def _by_connection(self, events: ClientEvents) -> Mapping[Connection, ClientEvents]:
        """The events of each stream, under its handles."""
        parts: dict[Connection, ClientEvents] = {}
        readers = list(map(self.readers.get, events.handles))
        if len(connections := {None if reader is None else reader.connection for reader in readers}) == 1:
            (connection,) = connections
            if connection is not None:
                # Most steps belong to one gateway: its part is made of whole columns.
                handles = [reader.handle for reader in readers if reader is not None]
                columns = (events.sequence_indices, events.offsets, events.token_ids)
                parts[connection] = ClientEvents(handles, *columns, events.with_logprobs, events.logprobs)
        else:
            places: dict[Connection, list[int]] = {}
            for place, reader in enumerate(readers):
                if reader is not None:
                    places.setdefault(reader.connection, []).append(place)
            for connection, own in places.items():
                handles = [reader.handle for place in own if (reader := readers[place]) is not None]
                parts[connection] = select(events, own, handles)
        for handle, end in ends_of(events):
            if (reader := self.readers.get(handle)) is not None:
                add_end(parts.setdefault(reader.connection, ClientEvents()), end, reader.handle)
        return parts
