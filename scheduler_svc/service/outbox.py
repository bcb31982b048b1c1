"""Events on their way to one gateway."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.rpc.errors import QuireError
from scheduler_svc.core.request import Handle
from scheduler_svc.core.step_plan import ClientEvents, Usage
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


class Outbox:
    """Keeps events until the gateway's stream takes them. Putting never waits: what piles up behind a slow stream goes
    out together, in order, MAX_SIZE at a time. It holds no more than the tokens that the gateway's live requests may
    still generate.

    What one request gets by one call goes out together, however much it is: a gateway that loses its scheduler half-way
    through a selection of sequences would ask the next one to go on with what it has.

    A gateway that gives credit gets no more messages of events than it has given credit for.
    """

    def __init__(self) -> None:
        self._waiting: deque[Outgoing] = deque()
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

    def close(self) -> None:
        """Nobody reads any more."""
        self._closed = True
        self._wake.set()

    async def take(self) -> Outgoing | None:
        """Waits for events, and for credit, and returns what goes out next; None once the outbox is closed."""
        while not self._closed:
            self._wake.clear()
            if self._credit != 0 and (self._waiting or self._is_ready is not None):
                return self._next()
            await self._wake.wait()
        return None

    def _next(self) -> Outgoing:
        outgoing = self._waiting.popleft() if self._waiting else Outgoing()
        outgoing.is_ready, self._is_ready = self._is_ready, None
        if self._credit is not None and outgoing.has_events:
            self._credit -= 1
        return outgoing

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
