"""Events on their way to readers: events that a gateway's stream has not sent yet (`Outbox`), and the kept events of
one request (`History`), so that a reader that has some of them gets the rest."""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from quire.messages.logprob_columns import LogprobColumns, LogprobLog
from quire.model_files.progress import LoadProgress
from quire.rpc.errors import QuireError
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.request import Handle, Request
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, RequestEnd, RequestFailure, SequenceEnd, Usage

MAX_SIZE = 50_000
"""Maximum size of one message: tokens, entries of log probabilities and ends, each about 16 bytes.

A gateway takes messages of up to 64 MiB, and neither side does anything else while it makes or reads one.
"""

_REPLAYED_AT_ONCE = 4096
"""Maximum size of one part of a replay, counted as in MAX_SIZE. It takes a millisecond to make. A gateway takes some
tens of milliseconds to detokenize it, and handles nothing else meanwhile."""

End = SequenceEnd | RequestEnd | RequestFailure


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of consecutive prompt tokens of a request."""

    handle: Handle
    first_position: int
    token_ids: Sequence[int]
    columns: LogprobColumns

    @property
    def end(self) -> int:
        """The position after the last of them."""
        return self.first_position + len(self.columns)

    def since(self, position: int) -> "PromptLogprobs | None":
        """The log probabilities from `position` on; None if there are none."""
        if position <= self.first_position:
            return self
        if position >= self.end:
            return None
        known = position - self.first_position
        columns = self.columns.part(known, len(self.columns))
        return PromptLogprobs(self.handle, position, self.token_ids[known:], columns)


# Events of a batch, request by request


def by_request(events: ClientEvents) -> dict[Handle, ClientEvents]:
    """Splits events by request; the order within each request stays."""
    parts: dict[Handle, ClientEvents] = {}

    def part_of(handle: Handle) -> ClientEvents:
        return parts.setdefault(handle, ClientEvents())

    columns = events.logprobs.columns() if events.with_logprobs else None
    begin = 0
    for handle, run in groupby(events.handles):
        end = begin + sum(1 for _ in run)
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
        begin = end
    for handle, ending in ends_of(events):
        add_end(part_of(handle), ending, handle)
    return parts


def select(events: ClientEvents, places: Sequence[int], handles: list[Handle]) -> ClientEvents:
    """The tokens at `places`, in rising order, with `handles` in place of their own. Ends are left out."""
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


def ends_of(events: ClientEvents) -> Iterator[tuple[Handle, End]]:
    """All ends, in order, each with the handle of its request."""
    for end in (*events.finished, *events.completed):
        yield end.handle, end
    for failure in events.failed:
        yield failure.key.handle, failure


def add_end(events: ClientEvents, end: End, handle: Handle) -> None:
    """Adds an end under another handle."""
    match end:
        case SequenceEnd():
            events.finished.append(end._replace(handle=handle))
        case RequestEnd():
            events.completed.append(end._replace(handle=handle))
        case RequestFailure():
            events.failed.append(replace(end, key=end.key._replace(handle=handle)))


# The kept output of one request


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a request that a reader has already: tokens of each sequence, the sequences that have ended for it,
    and log probabilities of the prompt before a position."""

    num_tokens: Mapping[int, int] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    end_of_prompt_logprobs: int = 1

    @classmethod
    def of(cls, request: Request, num_prompt_logprobs: int) -> "Held":
        """The fields of a gateway's resubmission."""
        return cls(
            {index: len(each.token_ids) for index, each in enumerate(request.emitted)},
            frozenset(index for index, each in enumerate(request.emitted) if each.has_ended),
            request.sampling.prompt_logprobs_start + num_prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """A sequence's number of tokens, and whether it has ended."""

    index: int
    num_tokens: int
    has_ended: bool


@dataclass(slots=True)
class _Output:
    """Consecutive tokens of one sequence, from offset `first` on; `logprobs` has one entry per token, or none."""

    first: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobLog = field(default_factory=LogprobLog)


class History:
    """Events of one request in order. They may begin anywhere in the output, but have no gaps after that."""

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}
        self._ends: dict[int, SequenceEnd] = {}
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._completed: list[RequestEnd] = []
        self._failed: list[RequestFailure] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in list(self._outputs.values()))

    @property
    def size(self) -> int:
        """Number of tokens and log probabilities."""
        logprobs = sum(output.logprobs.size for output in self._outputs.values())
        return self.num_tokens + logprobs + sum(entry.columns.size for entry in self._prompt_logprobs)

    def add_token(self, index: int, offset: int, token_id: int) -> None:
        """Adds the next token of a sequence, without log probabilities."""
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = _Output(offset)
        output.token_ids.append(token_id)

    def add(self, events: ClientEvents) -> None:
        """Adds the next events, all of this request."""
        for index, offset, token_id in zip(events.sequence_indices, events.offsets, events.token_ids, strict=True):
            self.add_token(index, offset, token_id)
        if events.with_logprobs:
            columns, positions = events.logprobs.columns(), np.arange(len(events.with_logprobs))
            indices = np.array(events.sequence_indices)[events.with_logprobs]
            for index in dict.fromkeys(indices.tolist()):
                self._outputs[index].logprobs.append(columns.take(positions[indices == index]))
        for _, end in ends_of(events):
            self.add_end(end)

    def add_end(self, end: End) -> None:
        """Adds the end of a sequence or of the request, after its tokens."""
        match end:
            case SequenceEnd():
                self._ends[end.sequence_index] = end
            case RequestEnd():
                self._completed.append(end)
            case RequestFailure():
                self._failed.append(end)

    def add_prompt_logprobs(self, entry: PromptLogprobs) -> None:
        self._prompt_logprobs.append(entry)

    def add_emitted(self, request: Request) -> None:
        """Adds the events that an earlier scheduler sent. The last token shows how a sequence ended, unless a stop
        string ended it, which gateways find themselves."""
        for index, emitted in enumerate(request.emitted):
            self._outputs[index] = _Output(0, list(map(int, emitted.token_ids)))
            if emitted.has_ended:
                last = emitted.token_ids[-1] if emitted.token_ids else None
                stop_token_id = last if last in request.stop_token_ids else None
                reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
                num_tokens = len(emitted.token_ids)
                self._ends[index] = SequenceEnd(request.key.handle, index, num_tokens, reason, stop_token_id)

    def clear(self) -> None:
        for kept in (self._outputs, self._ends, self._prompt_logprobs, self._completed, self._failed):
            kept.clear()

    def completes(self, held: Held, progress: Sequence[SequenceProgress] | None, end_of_prompt_logprobs: int) -> bool:
        """Whether this history has everything that a reader with `held` lacks.

        Args:
            progress: How far readers were sent each sequence; None if the request is over.
            end_of_prompt_logprobs: The first position of the prompt whose log probability has yet to come.
        """
        if self._failed:
            return True
        if progress is None and not self._completed:
            return False
        first_position = self._prompt_logprobs[0].first_position if self._prompt_logprobs else end_of_prompt_logprobs
        if first_position > held.end_of_prompt_logprobs:
            return False
        if progress is None:
            progress = [SequenceProgress(index, end.num_tokens, has_ended=True) for index, end in self._ends.items()]
        return not any(self._lacks(each, held) for each in progress if each.index not in held.ended)

    def _lacks(self, progress: SequenceProgress, held: Held) -> bool:
        if progress.has_ended and progress.index not in self._ends:
            return True
        output = self._outputs.get(progress.index)
        return held.num_tokens.get(progress.index, 0) < (progress.num_tokens if output is None else output.first)

    def since(self, held: Held, handle: Handle) -> tuple[ClientEvents, list[PromptLogprobs]]:
        """Copies the events that a reader lacks, under the handle that it knows the request by."""
        events = ClientEvents()
        for index in self.indices():
            if index not in held.ended:
                self.add_tokens(events, handle, index, held.num_tokens.get(index, 0))
        self.add_ends(events, handle, held.ended)
        return events, self.prompt_logprobs_since(held.end_of_prompt_logprobs, handle)

    def indices(self) -> list[int]:
        """The sequences that have tokens here."""
        return sorted(self._outputs)

    def add_tokens(
        self, events: ClientEvents, handle: Handle, index: int, begin: int, max_tokens: int | None = None
    ) -> int:
        """Adds the tokens of a sequence from offset `begin` on, or from its first one here; returns their number."""
        output = self._outputs[index]
        skipped = max(begin - output.first, 0)
        end = len(output.token_ids) if max_tokens is None else min(skipped + max_tokens, len(output.token_ids))
        token_ids = output.token_ids[skipped:end]
        first_event = len(events.handles)
        if len(output.logprobs) and token_ids:
            events.with_logprobs += range(first_event, first_event + len(token_ids))
            events.logprobs.append(output.logprobs.part(skipped, end))
        events.handles += [handle] * len(token_ids)
        events.sequence_indices += [index] * len(token_ids)
        events.offsets += range(output.first + skipped, output.first + end)
        events.token_ids += token_ids
        return len(token_ids)

    def add_ends(self, events: ClientEvents, handle: Handle, ended: frozenset[int]) -> None:
        """Adds all ends except ends of sequences that have ended for the reader."""
        ends = [end for index, end in sorted(self._ends.items()) if index not in ended]
        for end in (*ends, *self._completed, *self._failed):
            add_end(events, end, handle)

    def prompt_logprobs_since(self, position: int, handle: Handle) -> list[PromptLogprobs]:
        entries = [entry.since(position) for entry in self._prompt_logprobs]
        return [replace(entry, handle=handle) for entry in entries if entry is not None]


class Replay:
    """The events of a history that a reader lacks, in parts. The history may grow meanwhile: its new events go into the
    outbox directly only after `on_done` was called, with the last part."""

    def __init__(
        self, history: History, held: Held, handle: Handle, charge_per_token: int, on_done: Callable[[], object]
    ) -> None:
        """`charge_per_token` is the size of a token with its log probabilities."""
        self._history = history
        self._num_tokens = dict(held.num_tokens)
        self._ended = held.ended
        self._max_tokens = max(_REPLAYED_AT_ONCE // charge_per_token, 1)
        self._on_done = on_done
        self.handle = handle
        self.is_done = False

    def next_part(self) -> ClientEvents:
        """The next tokens. The ends come with the last part."""
        events, room = ClientEvents(), self._max_tokens
        for index in self._history.indices():
            if index not in self._ended:
                begin = self._num_tokens.get(index, 0)
                count = self._history.add_tokens(events, self.handle, index, begin, room)
                self._num_tokens[index], room = begin + count, room - count
        if room > 0:
            self.is_done = True
            self._history.add_ends(events, self.handle, self._ended)
            self._on_done()
        return events


# The messages to one gateway


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether gateways should send requests to a replica, and its workers' progress in loading their model. A replica
    that drains never becomes ready again. Its requests move away after `leave_after_s`, even if they have to wait for
    room elsewhere; it is busy while it has some."""

    is_ready: bool
    loading: LoadProgress | None
    is_draining: bool = False
    leave_after_s: float = 0.0
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Changes of the prefix cache and of the blocks on disk, in the order in which a reader applies them. Blocks are
    the joined ends of their hashes; only blocks whose hash ends in `sampling_bits` zero bits are reported."""

    is_cleared: bool
    removed: bytes
    stored: bytes
    disk_removed: bytes
    disk_stored: bytes
    sampling_bits: int


@dataclass(slots=True)
class Outgoing:
    """One batch of data for a gateway: the events of one or more steps, oldest first, log probabilities of prompts,
    refused submissions, usage of aborted requests, requests that moved elsewhere, offers that there is room for, and
    changes of readiness and of the cache. `size` is counted as in MAX_SIZE."""

    step_id: int = 0
    batches: list[ClientEvents] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    refusals: list[tuple[Handle, QuireError]] = field(default_factory=list)
    aborted: list[tuple[Handle, Usage | None]] = field(default_factory=list)
    moved: list[tuple[Handle, KvSource]] = field(default_factory=list)
    has_room: list[Handle] = field(default_factory=list)
    readiness: Readiness | None = None
    cache: CacheUpdate | None = None
    size: int = 0

    @property
    def has_events(self) -> bool:
        ended = self.refusals or self.aborted or self.moved
        return bool(self.batches or self.prompt_logprobs or ended or self.has_room)

    @property
    def ended(self) -> Iterator[Handle]:
        """The requests whose ends it has."""
        for batch in self.batches:
            yield from (end.handle for end in batch.completed)
            yield from (failure.key.handle for failure in batch.failed)


class Outbox:
    """Holds events until the gateway's stream sends them. Putting never waits: events that pile up behind a slow stream
    go out together, in order, MAX_SIZE at a time. It holds no more than the tokens that the gateway's live requests may
    still generate.

    The events that one call puts for one request go out together, at any size: a gateway that loses its
    scheduler half-way through a selection of sequences would resubmit the request with the tokens that it has.

    A gateway that gives credit gets no more messages of events than its credit. Each message is kept until the gateway
    has acknowledged it; on a stream without credit, until it is written.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outgoing] = deque()
        self._sent: deque[Outgoing] = deque()
        # Replays take turns with each other, and all together with new events.
        self._replays: dict[Handle, Replay] = {}
        self._is_replays_turn = False
        self._num_taken = 0
        self._readiness: Readiness | None = None
        self._cache: Callable[[], CacheUpdate] | None = None
        self._credit: int | None = None
        self._wake = asyncio.Event()
        self.is_closed = False

    def put(self, step_id: int, events: ClientEvents) -> None:
        parts = [events] if _size_of(events) <= MAX_SIZE else by_request(events).values()
        for part in parts:
            outgoing = self._make_room(_size_of(part))
            outgoing.step_id = step_id
            outgoing.batches.append(part)

    def put_prompt_logprobs(self, entries: Sequence[PromptLogprobs]) -> None:
        """Called before the events of the same step, so that they never go out after the tokens that follow them."""
        for entry in entries:
            self._make_room(entry.columns.size).prompt_logprobs.append(entry)

    def put_replay(self, replay: Replay) -> None:
        """Sends the events that a reader lacks, part by part. No other events of its request may be put until the
        replay is done or dropped."""
        self._replays[replay.handle] = replay
        self._wake.set()

    def drop_replay(self, handle: Handle) -> None:
        """Drops the replay of a request. No effect if there is none."""
        self._replays.pop(handle, None)

    def put_refusal(self, handle: Handle, error: QuireError) -> None:
        self._make_room(1).refusals.append((handle, error))

    def put_aborted(self, handle: Handle, usage: Usage | None) -> None:
        """Answers an Abort with the usage of the request; None if the request is not known."""
        self._make_room(1).aborted.append((handle, usage))

    def put_moved(self, handle: Handle, source: KvSource) -> None:
        """A request continues elsewhere, and its blocks can be fetched there. Called after all of its events."""
        self._make_room(1).moved.append((handle, source))

    def put_has_room(self, handle: Handle) -> None:
        """There is room for an offer."""
        self._make_room(1).has_room.append(handle)

    def put_readiness(self, readiness: Readiness) -> None:
        """Reports whether this replica is ready, and its workers' progress in loading."""
        self._readiness = readiness
        self._wake.set()

    def put_cache(self, update: CacheUpdate, snapshot: Callable[[], CacheUpdate]) -> None:
        """Reports changes of the prefix cache. If the update before has not gone out yet, `snapshot` makes an update
        with the whole cache, which replaces both."""
        self._cache = (lambda: update) if self._cache is None else snapshot
        self._wake.set()

    def add_credit(self, num_messages: int) -> None:
        """The gateway is ready for `num_messages` more messages."""
        self._credit = (self._credit or 0) + num_messages
        self._wake.set()

    @property
    def has_credit(self) -> bool:
        """Whether the gateway gives credit at all."""
        return self._credit is not None

    @property
    def num_sent(self) -> int:
        """The number of messages of events that were sent."""
        return self._num_taken + len(self._sent)

    def close(self) -> None:
        """The stream ended."""
        self.is_closed = True
        self._wake.set()

    def taken(self, num_messages: int) -> list[Outgoing]:
        """The gateway has acknowledged `num_messages` messages of events since the stream began. Returns the newly
        acknowledged ones. Raises ValueError if fewer were sent."""
        if num_messages > self.num_sent:
            raise ValueError(f"{num_messages} messages were taken in, {self.num_sent} were sent")
        new = [self._sent.popleft() for _ in range(num_messages - self._num_taken)]
        self._num_taken += len(new)
        return new

    def untaken(self) -> list[Outgoing]:
        """The messages that the gateway has not acknowledged, in order."""
        return [*self._sent, *self._waiting]

    async def take(self) -> Outgoing | None:
        """Waits until `poll` returns a message, and returns it; None once the outbox is closed."""
        while not self.is_closed:
            self._wake.clear()
            if (outgoing := self.poll()) is not None:
                return outgoing
            await self._wake.wait()
        return None

    def poll(self) -> Outgoing | None:
        """The message that may be sent now, or None. Events need credit; readiness and the cache do not."""
        may_send_events = bool(self._waiting or self._replays) and self._credit != 0
        if self.is_closed or not (may_send_events or self._readiness is not None or self._cache is not None):
            return None
        outgoing = Outgoing()
        if may_send_events:
            is_replay = bool(self._replays) and (self._is_replays_turn or not self._waiting)
            self._is_replays_turn = not is_replay
            outgoing = self._next_of_replays() if is_replay else self._waiting.popleft()
            self._sent.append(outgoing)
            if self._credit is not None:
                self._credit -= 1
        outgoing.readiness, self._readiness = self._readiness, None
        if self._cache is not None:
            outgoing.cache, self._cache = self._cache(), None
        return outgoing

    def _next_of_replays(self) -> Outgoing:
        handle, replay = next(iter(self._replays.items()))
        del self._replays[handle]
        events = replay.next_part()
        if not replay.is_done:
            self._replays[handle] = replay
        return Outgoing(batches=[events])

    def _make_room(self, size: int) -> Outgoing:
        """The message that has room for an item of this size."""
        if not self._waiting or self._waiting[-1].size + size > MAX_SIZE:
            self._waiting.append(Outgoing())
        self._waiting[-1].size += size
        self._wake.set()
        return self._waiting[-1]


def _size_of(events: ClientEvents) -> int:
    num_ends = len(events.finished) + len(events.completed) + len(events.failed)
    return len(events.token_ids) + events.logprobs.size + num_ends
