"""Events on their way to one gateway."""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.rpc.errors import QuireError
from scheduler_svc.core.events import ClientEvents, Usage
from scheduler_svc.core.request import Handle
from scheduler_svc.service.client_events import by_request
from scheduler_svc.service.prompt_logprobs import PromptLogprobs

MAX_SIZE = 50_000
"""The most that goes out together: tokens, entries of log probabilities and ends, each about 16 bytes of a message.

A gateway takes messages of up to 64 MiB, and neither side does anything else while it makes or reads one.
"""


@dataclass(slots=True)
class Outgoing:
    """What goes out together: the events of one or more steps, oldest first, log probabilities of prompts, refused
    submissions, what aborted requests have cost, and whether the replica is ready, where that has changed. `size` is
    counted as in MAX_SIZE."""

    step_id: int = 0
    batches: list[ClientEvents] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    refusals: list[tuple[Handle, QuireError]] = field(default_factory=list)
    aborted: list[tuple[Handle, Usage | None]] = field(default_factory=list)
    is_ready: bool | None = None
    size: int = 0

    @property
    def has_events(self) -> bool:
        return bool(self.batches or self.prompt_logprobs or self.refusals or self.aborted)

    @property
    def ended(self) -> Iterator[Handle]:
        """The requests whose ends are in it."""
        for batch in self.batches:
            yield from (end.handle for end in batch.completed)
            yield from (failure.key.handle for failure in batch.failed)


class Outbox:
    """Keeps events until the gateway's stream takes them. Putting never waits: what piles up behind a slow stream goes
    out together, in order, MAX_SIZE at a time. It holds no more than the tokens that the gateway's live requests may
    still generate.

    What one request gets by one call goes out together, however much it is: a gateway that loses its scheduler half-way
    through a selection of sequences would ask the next one to go on with what it has.

    A gateway that gives credit gets no more messages of events than it has given credit for. Each is kept until the
    gateway has taken it in; on a stream without credit that is as soon as it is written.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outgoing] = deque()
        self._sent: deque[Outgoing] = deque()
        self._num_taken = 0
        self._is_ready: bool | None = None
        self._credit: int | None = None
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, step_id: int, events: ClientEvents) -> None:
        parts = [events] if _size_of(events) <= MAX_SIZE else by_request(events).values()
        for part in parts:
            outgoing = self._make_room(_size_of(part))
            outgoing.step_id = step_id
            outgoing.batches.append(part)

    def put_prompt_logprobs(self, entries: Sequence[PromptLogprobs]) -> None:
        """To be put before the events of their step, so that they never go out after the tokens that follow them."""
        for entry in entries:
            outgoing = self._make_room(entry.columns.size)
            outgoing.prompt_logprobs.append(entry)

    def put_refusal(self, handle: Handle, error: QuireError) -> None:
        self._make_room(1).refusals.append((handle, error))

    def put_aborted(self, handle: Handle, usage: Usage | None) -> None:
        """A request that the gateway has ended; None where it was not known."""
        self._make_room(1).aborted.append((handle, usage))

    def put_readiness(self, is_ready: bool) -> None:
        """This replica is one to send requests to, or no longer."""
        self._is_ready = is_ready
        self._wake.set()

    def add_credit(self, num_messages: int) -> None:
        """The gateway is ready for so many messages more."""
        self._credit = (self._credit or 0) + num_messages
        self._wake.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def has_credit(self) -> bool:
        """Whether the gateway gives credit at all."""
        return self._credit is not None

    @property
    def num_sent(self) -> int:
        """How many messages of events went out."""
        return self._num_taken + len(self._sent)

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed = True
        self._wake.set()

    def taken(self, num_messages: int) -> list[Outgoing]:
        """The gateway has taken in so many messages of events, all together. Returns those that are new. Raises
        ValueError where not so many were sent."""
        if num_messages > self.num_sent:
            raise ValueError(f"{num_messages} messages were taken in, {self.num_sent} were sent")
        new = [self._sent.popleft() for _ in range(num_messages - self._num_taken)]
        self._num_taken += len(new)
        return new

    def untaken(self) -> list[Outgoing]:
        """What the gateway has not taken in, in order."""
        return [*self._sent, *self._waiting]

    async def take(self) -> Outgoing | None:
        """Waits until `poll` has something, and returns that; None once the outbox is closed."""
        while not self._closed:
            self._wake.clear()
            if (outgoing := self.poll()) is not None:
                return outgoing
            await self._wake.wait()
        return None

    def poll(self) -> Outgoing | None:
        """What may go out now, None where that is nothing. Events need credit, readiness does not."""
        if self._closed or not (self._may_send_events or self._is_ready is not None):
            return None
        outgoing = Outgoing()
        if self._may_send_events:
            outgoing = self._waiting.popleft()
            self._sent.append(outgoing)
            if self._credit is not None:
                self._credit -= 1
        outgoing.is_ready, self._is_ready = self._is_ready, None
        return outgoing

    @property
    def _may_send_events(self) -> bool:
        return bool(self._waiting) and self._credit != 0

    def _make_room(self, size: int) -> Outgoing:
        """Where to put something of this size."""
        if not self._waiting or self._waiting[-1].size + size > MAX_SIZE:
            self._waiting.append(Outgoing())
        self._waiting[-1].size += size
        self._wake.set()
        return self._waiting[-1]


def _size_of(events: ClientEvents) -> int:
    num_ends = len(events.finished) + len(events.completed) + len(events.failed)
    return len(events.token_ids) + events.logprobs.size + num_ends
