"""Events on their way to one gateway."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.rpc.errors import QuireError
from scheduler_svc.core.request import Handle
from scheduler_svc.core.step_plan import ClientEvents, Usage
from scheduler_svc.service.prompt_logprobs import PromptLogprobs


@dataclass(slots=True)
class Outgoing:
    """What goes out together: the events of one or more steps, oldest first, log probabilities of prompts, refused
    submissions, what aborted requests have cost, and whether the replica is ready, where that has changed."""

    step_id: int = 0
    batches: list[ClientEvents] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    refusals: list[tuple[Handle, QuireError]] = field(default_factory=list)
    aborted: list[tuple[Handle, Usage | None]] = field(default_factory=list)
    is_ready: bool | None = None

    @property
    def is_empty(self) -> bool:
        return not self.has_events and self.is_ready is None

    @property
    def has_events(self) -> bool:
        return bool(self.batches or self.prompt_logprobs or self.refusals or self.aborted)


class Outbox:
    """Keeps events until the gateway's stream takes them. Putting never waits: what piles up behind a slow stream goes
    out together. It holds no more than the tokens that the gateway's live requests may still generate.

    A gateway that gives credit gets no more batches than it has given credit for.
    """

    def __init__(self) -> None:
        self._outgoing = Outgoing()
        self._credit: int | None = None
        self._wake = asyncio.Event()
        self._closed = False

    def put(self, step_id: int, events: ClientEvents) -> None:
        self._outgoing.step_id = step_id
        self._outgoing.batches.append(events)
        self._wake.set()

    def put_prompt_logprobs(self, entries: Sequence[PromptLogprobs]) -> None:
        """To be put before the events of their step, so that they never go out after the tokens that follow them."""
        self._outgoing.prompt_logprobs += entries
        self._wake.set()

    def put_refusal(self, handle: Handle, error: QuireError) -> None:
        self._outgoing.refusals.append((handle, error))
        self._wake.set()

    def put_aborted(self, handle: Handle, usage: Usage | None) -> None:
        """A request that the gateway has ended; None where it was not known."""
        self._outgoing.aborted.append((handle, usage))
        self._wake.set()

    def put_readiness(self, is_ready: bool) -> None:
        """This replica is one to send requests to, or no longer."""
        self._outgoing.is_ready = is_ready
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
        """Waits for events, and for credit, and returns all that there are; None once the outbox is closed."""
        while True:
            await self._wake.wait()
            if self._closed:
                return None
            self._wake.clear()
            if self._credit != 0 and not self._outgoing.is_empty:
                break
        outgoing, self._outgoing = self._outgoing, Outgoing()
        if self._credit is not None and outgoing.has_events:
            self._credit -= 1
        return outgoing
