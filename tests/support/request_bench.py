"""A table of the scheduler's requests, with a core and timers that obey the test."""

from collections.abc import Callable
from dataclasses import dataclass, field

from scheduler_svc.core.request import EmittedSequence, Request, RequestKey
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, RequestEnd, SequenceEnd, Usage
from scheduler_svc.service.durable import DurableLimits
from scheduler_svc.service.outbox import Held, Outgoing, SequenceProgress
from scheduler_svc.service.requests import Connection, OwnedRequest, Reader, Requests

NONCE = 7
GRACE_S = 10.0
NO_USAGE = Usage(1, 0, 0, 0, 0.0, 0.0, 0.0)


class Timers:
    """Calls that are due when a test says so."""

    @dataclass(eq=False)
    class Timer:
        at: float
        call: Callable[[], object]
        pending: set["Timers.Timer"]

        def cancel(self) -> None:
            self.pending.discard(self)

    def __init__(self) -> None:
        self.now = 0.0
        self.pending: set[Timers.Timer] = set()

    def call_later(self, seconds: float, call: Callable[[], object]) -> "Timers.Timer":
        timer = Timers.Timer(self.now + seconds, call, self.pending)
        self.pending.add(timer)
        return timer

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for timer in [each for each in self.pending if each.at <= self.now]:
            self.pending.discard(timer)
            timer.call()


@dataclass
class Core:
    """What the table asks of the core: live requests, as their keys and how far their sequences are."""

    live: dict[RequestKey, list[SequenceProgress]] = field(default_factory=dict)

    def abort(self, key: RequestKey) -> bool:
        return self.live.pop(key, None) is not None

    def progress(self, key: RequestKey) -> list[SequenceProgress] | None:
        return self.live.get(key)


@dataclass
class Bench:
    """A table, and a core and timers that obey the test."""

    core: Core = field(default_factory=Core)
    timers: Timers = field(default_factory=Timers)
    limits: DurableLimits = field(default_factory=lambda: DurableLimits(8, 10_000, 60.0))

    def __post_init__(self) -> None:
        self.requests = Requests(self.core.abort, self.core.progress, self.limits, self.timers.call_later)
        self.num_steps = 0

    def connect(self, gateway_id: str = "gateway-a", *, credit: int = 100) -> Connection:
        connection = self.requests.connect(gateway_id, GRACE_S)
        connection.outbox.add_credit(credit)
        return connection

    def admit(
        self, request: Request, connection: Connection, *, durable: bool = False, nonce: int = NONCE
    ) -> OwnedRequest:
        reader = Reader(connection, request.key.handle)
        admitted = self.requests.admit(request, nonce, reader, b"" if durable else None)
        owned = reader.request
        assert owned is not None
        emitted = admitted.emitted or [EmittedSequence(())] * admitted.num_returned
        progress = [SequenceProgress(i, len(each.token_ids), each.has_ended) for i, each in enumerate(emitted)]
        self.core.live[owned.key] = progress
        return owned

    def resubmit(self, request: Request, connection: Connection, held: Held, nonce: int = NONCE) -> OwnedRequest | None:
        reader = Reader(connection, request.key.handle)
        return reader.request if self.requests.resubmit(request, nonce, reader, held) else None

    def step(self, *owned: OwnedRequest, ends: bool = False) -> None:
        """One more token of the first sequence of each; its id is its offset."""
        self.num_steps += 1
        events = ClientEvents()
        for each in owned:
            (progress, *others) = self.core.live[each.key]
            handle, offset = each.key.handle, progress.num_tokens
            events.handles.append(handle)
            events.sequence_indices.append(0)
            events.offsets.append(offset)
            events.token_ids.append(offset)
            self.core.live[each.key] = [SequenceProgress(0, offset + 1, ends), *others]
            if ends:
                del self.core.live[each.key]
                events.finished.append(SequenceEnd(handle, 0, offset + 1, FinishReason.LENGTH, None))
                events.completed.append(RequestEnd(handle, NO_USAGE))
        self.requests.deliver(self.num_steps, events)


def take_all(connection: Connection) -> list[Outgoing]:
    taken = []
    while (outgoing := connection.outbox.poll()) is not None:
        taken.append(outgoing)
    return taken


def offsets_of(outgoing: list[Outgoing], handle: int) -> list[int]:
    batches = [batch for each in outgoing for batch in each.batches]
    return [
        offset for batch in batches for of, offset in zip(batch.handles, batch.offsets, strict=True) if of == handle
    ]


def ends_of(outgoing: list[Outgoing]) -> list[int]:
    return [handle for each in outgoing for handle in each.ended]


def has(num_tokens: int) -> Held:
    return Held({0: num_tokens})
