"""The outbox of a gateway's stream: events and state that the stream has not sent, and sent messages that the gateway
has not acknowledged.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.model_files.progress import LoadProgress
from quire.rpc.errors import QuireError
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.request import Handle
from scheduler_svc.core.step import ClientEvents, Usage
from scheduler_svc.service.history import PromptLogprobs, Replay, split_by_request

MAX_SIZE = 50_000
"""Maximum size of one message, as a number of tokens, log probabilities and ends. Each of them has about 16 bytes.

A gateway takes messages of up to 64 MiB, but each side does nothing else while it makes or reads one.
"""


@dataclass(frozen=True, slots=True)
class Readiness:
    """The state of a replica that gateways need to place requests.

    Attributes:
        is_ready: Whether gateways should send requests.
        loading: The workers' progress in loading their model; None if they report none.
        is_draining: Whether the replica drains; then it never becomes ready again.
        leave_after_s: Seconds after which requests leave a draining replica even if they have to wait elsewhere.
        is_busy: Whether a draining replica still has requests or blocks for others.
    """

    is_ready: bool
    loading: LoadProgress | None
    is_draining: bool = False
    leave_after_s: float = 0.0
    is_busy: bool = False


@dataclass(frozen=True, slots=True)
class CacheUpdate:
    """Changes of the prefix cache, in the order in which a gateway applies them. `disk_removed` and `disk_stored` are
    the blocks below the pool, on disk and in host memory. Each block is named by the end of its hash, and the names are
    joined. Only blocks whose hash ends in `sampling_bits` zero bits are reported."""

    is_cleared: bool
    removed: bytes
    stored: bytes
    disk_removed: bytes
    disk_stored: bytes
    sampling_bits: int


@dataclass(slots=True)
class Outgoing:
    """One message to a gateway.

    Attributes:
        step_id: The newest step in `batches`.
        batches: The events of one or more steps, oldest first.
        prompt_logprobs: Log probabilities of prompts.
        refusals: Refused submissions, and requests that another call took over or cancelled, each with its error.
        aborted: Usage of aborted requests; None if the request was not known.
        moved: Requests that continue at another replica, each with the place of its blocks.
        has_room: Offers for which room is reserved here.
        readiness, cache: Changes; None if there are none.
        size: Its size, in the unit of MAX_SIZE.
    """

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
        """Requests whose end is in `batches`."""
        for batch in self.batches:
            yield from (end.handle for end in batch.completed)
            yield from (failure.key.handle for failure in batch.failed)


class Outbox:
    """Collects events for one stream, and keeps messages until the gateway has acknowledged them.

    Putting never waits. Events that pile up behind a slow stream are joined into messages of at most MAX_SIZE, in
    order. Their number is bounded by the tokens that the gateway's live requests may still generate.

    All events that one call of `put` has for one request are in one message, even above MAX_SIZE. A request that
    selects the best of its sequences sends them all at its end. If they were split, and the scheduler were lost between
    the parts, the gateway would resubmit the request with only the first part.

    A gateway that gives credit gets only that number of messages of events. On a stream without credit, a message
    counts as acknowledged once it is written.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outgoing] = deque()
        self._sent: deque[Outgoing] = deque()
        # Replays take turns; between two parts, a message of new events is sent.
        self._replays: dict[Handle, Replay] = {}
        self._is_replays_turn = False
        self._num_acknowledged = 0
        self._readiness: Readiness | None = None
        self._cache: Callable[[], CacheUpdate] | None = None
        self._credit: int | None = None
        self._wake = asyncio.Event()
        self.is_closed = False

    def put(self, step_id: int, events: ClientEvents) -> None:
        """Adds the events of a step."""
        parts = [events] if _size_of(events) <= MAX_SIZE else split_by_request(events).values()
        for part in parts:
            outgoing = self._message_for(_size_of(part))
            outgoing.step_id = step_id
            outgoing.batches.append(part)

    def put_prompt_logprobs(self, entries: Sequence[PromptLogprobs]) -> None:
        """Adds log probabilities of prompts. Called before `put` for the same step, since they precede its tokens."""
        for entry in entries:
            self._message_for(entry.columns.size).prompt_logprobs.append(entry)

    def put_replay(self, replay: Replay) -> None:
        """Sends the earlier output of a request again, part by part. No other events of its request may be put until it
        is done or dropped."""
        self._replays[replay.handle] = replay
        self._wake.set()

    def drop_replay(self, handle: Handle) -> None:
        """Drops the replay of a request. No effect if there is none."""
        self._replays.pop(handle, None)

    def put_refusal(self, handle: Handle, error: QuireError) -> None:
        self._message_for(1).refusals.append((handle, error))

    def put_aborted(self, handle: Handle, usage: Usage | None) -> None:
        """Answers an Abort with the usage of the request; None if the request is not known."""
        self._message_for(1).aborted.append((handle, usage))

    def put_moved(self, handle: Handle, source: KvSource) -> None:
        """A request continues at another replica, which can fetch its blocks from `source`. Called after all of its
        events."""
        self._message_for(1).moved.append((handle, source))

    def put_has_room(self, handle: Handle) -> None:
        """There is room for an offer."""
        self._message_for(1).has_room.append(handle)

    def put_readiness(self, readiness: Readiness) -> None:
        """Reports whether this replica is ready, and its workers' progress in loading."""
        self._readiness = readiness
        self._wake.set()

    def put_cache(self, update: CacheUpdate, snapshot: Callable[[], CacheUpdate]) -> None:
        """Reports changes of the prefix cache. If the earlier update is not sent yet, one with the whole cache replaces
        both; `snapshot` makes it when it is sent."""
        self._cache = (lambda: update) if self._cache is None else snapshot
        self._wake.set()

    def add_credit(self, num_messages: int) -> None:
        """The gateway is ready for `num_messages` more messages."""
        self._credit = (self._credit or 0) + num_messages
        self._wake.set()

    @property
    def has_credit(self) -> bool:
        """Whether the gateway gives credit."""
        return self._credit is not None

    @property
    def num_sent(self) -> int:
        """The number of messages of events that were sent."""
        return self._num_acknowledged + len(self._sent)

    def close(self) -> None:
        """The stream ended."""
        self.is_closed = True
        self._wake.set()

    def acknowledge(self, num_messages: int) -> list[Outgoing]:
        """The gateway has acknowledged `num_messages` messages of events since the stream began. Returns the newly
        acknowledged ones. Raises ValueError if fewer were sent."""
        if num_messages > self.num_sent:
            raise ValueError(f"{num_messages} messages were taken in, {self.num_sent} were sent")
        new = [self._sent.popleft() for _ in range(num_messages - self._num_acknowledged)]
        self._num_acknowledged += len(new)
        return new

    def unacknowledged(self) -> list[Outgoing]:
        """The messages that the gateway has not acknowledged, in order."""
        return [*self._sent, *self._waiting]

    async def next_message(self) -> Outgoing | None:
        """Waits for the next message; None once the outbox is closed."""
        while not self.is_closed:
            self._wake.clear()
            if (outgoing := self.poll()) is not None:
                return outgoing
            await self._wake.wait()
        return None

    def poll(self) -> Outgoing | None:
        """The message that can be sent now, or None. Events need credit; readiness and the cache do not."""
        may_send_events = bool(self._waiting or self._replays) and self._credit != 0
        if self.is_closed or not (may_send_events or self._readiness is not None or self._cache is not None):
            return None
        outgoing = Outgoing()
        if may_send_events:
            is_replay = bool(self._replays) and (self._is_replays_turn or not self._waiting)
            self._is_replays_turn = not is_replay
            outgoing = self._next_replay_part() if is_replay else self._waiting.popleft()
            self._sent.append(outgoing)
            if self._credit is not None:
                self._credit -= 1
        outgoing.readiness, self._readiness = self._readiness, None
        if self._cache is not None:
            outgoing.cache, self._cache = self._cache(), None
        return outgoing

    def _next_replay_part(self) -> Outgoing:
        handle, replay = next(iter(self._replays.items()))
        del self._replays[handle]
        events = replay.next_part()
        if not replay.is_done:
            self._replays[handle] = replay
        return Outgoing(batches=[events])

    def _message_for(self, size: int) -> Outgoing:
        """The waiting message that an item of this size is added to."""
        if not self._waiting or self._waiting[-1].size + size > MAX_SIZE:
            self._waiting.append(Outgoing())
        self._waiting[-1].size += size
        self._wake.set()
        return self._waiting[-1]


def _size_of(events: ClientEvents) -> int:
    num_ends = len(events.finished) + len(events.completed) + len(events.failed)
    return len(events.token_ids) + events.logprobs.size + num_ends
