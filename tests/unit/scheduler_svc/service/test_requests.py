"""The table of requests: whoever reads one gets each of its events once, and what is kept is bounded."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.rpc.errors import Aborted, AlreadyExists, Cancelled, NotFound, ResourceExhausted
from scheduler_svc.core.request import EmittedSequence, Handle, Request, RequestKey
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, RequestEnd, RequestFailure, SequenceEnd, Usage
from scheduler_svc.service import requests as table
from scheduler_svc.service.durable import MAX_GROWTH, Durable, DurableLimits
from scheduler_svc.service.outbox import Held, Outgoing, PromptLogprobs, SequenceProgress
from scheduler_svc.service.requests import MAX_CANCELLED, Connection, OwnedRequest, Reader, Requests
from tests.support.core_driver import make_request
from tests.support.logprobs import Line, columns_of

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

    def step(self, *owned: OwnedRequest, ends: bool = False, with_logprobs: bool = False) -> None:
        """One more token of the first sequence of each; its id is its offset."""
        self.num_steps += 1
        events = ClientEvents()
        for each in owned:
            (progress, *others) = self.core.live[each.key]
            handle, offset = each.key.handle, progress.num_tokens
            if with_logprobs:
                events.with_logprobs.append(len(events.handles))
                events.logprobs.append(columns_of([Line(-float(offset), 1)]))
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

    def fail(self, owned: OwnedRequest) -> None:
        del self.core.live[owned.key]
        self.requests.deliver(0, ClientEvents(failed=[RequestFailure(owned.key, "REASON", "why")]))


@pytest.fixture
def bench() -> Bench:
    return Bench()


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


# A gateway comes back.


def test_a_gateway_that_returns_gets_what_was_on_its_way_and_what_came_meanwhile(bench):
    first = bench.connect()
    request = make_request(3)
    owned = bench.admit(request, first)
    bench.step(owned)
    assert offsets_of(take_all(first), 3) == [0]
    bench.requests.taken(first, 1)
    for _ in range(2):
        bench.step(owned)
        first.outbox.poll()
    bench.step(owned)
    bench.requests.close(first)
    bench.step(owned)
    second = bench.connect()
    assert bench.resubmit(request, second, has(1)) is owned
    bench.step(owned, ends=True)
    outgoing = take_all(second)
    assert offsets_of(outgoing, 3) == [1, 2, 3, 4, 5]
    assert ends_of(outgoing) == [3]
    assert offsets_of(take_all(first), 3) == []


def test_what_it_has_of_that_is_not_sent_again(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    for _ in range(5):
        bench.step(owned, with_logprobs=True)
    take_all(first)
    bench.requests.close(first)
    second = bench.connect()
    bench.resubmit(make_request(3), second, has(4))
    (outgoing,) = take_all(second)
    (batch,) = outgoing.batches
    assert batch.offsets == [4]
    assert batch.with_logprobs == [0]
    assert batch.logprobs.columns().chosen_logprobs.tolist() == [-4.0]


def test_an_end_that_nobody_was_told_of_is_kept_until_it_is_taken_in(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    bench.step(owned, ends=True)
    take_all(first)
    bench.requests.close(first)
    for _ in range(2):
        connection = bench.connect()
        bench.resubmit(make_request(3), connection, has(0))
        outgoing = take_all(connection)
        assert offsets_of(outgoing, 3) == [0]
        assert ends_of(outgoing) == [3]
        bench.requests.close(connection)
    connection = bench.connect()
    bench.resubmit(make_request(3), connection, has(1))
    outgoing = take_all(connection)
    assert offsets_of(outgoing, 3) == []
    assert ends_of(outgoing) == [3]
    bench.requests.taken(connection, 1)
    assert len(bench.requests) == 0
    assert not bench.timers.pending


def test_a_failure_is_kept_as_well(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    bench.requests.close(first)
    bench.fail(owned)
    second = bench.connect()
    bench.resubmit(make_request(3), second, has(0))
    assert ends_of(take_all(second)) == [3]


def test_a_reader_that_lacks_more_than_is_kept_is_not_attached_and_the_request_ends(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    for _ in range(3):
        bench.step(owned)
        first.outbox.poll()
    bench.requests.taken(first, 2)
    bench.requests.close(first)
    assert bench.resubmit(make_request(3), bench.connect(), has(1)) is None
    assert not bench.core.live
    assert len(bench.requests) == 0


def test_so_it_is_where_nothing_is_kept_at_all(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    bench.step(owned)
    first.outbox.poll()
    bench.requests.taken(first, 1)
    bench.requests.close(first)
    assert bench.resubmit(make_request(3), bench.connect(), has(0)) is None


def test_a_handle_that_stands_for_another_request_by_now_does_not_mix_their_tokens(bench):
    first = bench.connect()
    earlier = bench.admit(make_request(3), first, nonce=1)
    bench.step(earlier, ends=True)
    take_all(first)
    later = bench.admit(make_request(3), first, nonce=2)
    bench.step(later)
    bench.requests.close(first)
    assert bench.resubmit(make_request(3), bench.connect(), has(0), nonce=2) is None


def test_sequences_that_ended_for_the_reader_are_left_out(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3, num_sequences=2), first)
    handle = owned.key.handle
    events = ClientEvents([handle] * 2, [0, 1], [0, 0], [5, 6])
    events.finished += [SequenceEnd(handle, index, 1, FinishReason.LENGTH, None) for index in range(2)]
    events.completed.append(RequestEnd(handle, NO_USAGE))
    del bench.core.live[owned.key]
    bench.requests.deliver(1, events)
    bench.requests.close(first)
    second = bench.connect()
    bench.resubmit(make_request(3, num_sequences=2), second, Held({0: 1}, frozenset([0])))
    ((batch,),) = [each.batches for each in take_all(second)]
    assert (batch.sequence_indices, batch.token_ids) == ([1], [6])
    assert [end.sequence_index for end in batch.finished] == [1]


def prompt_report(owned: OwnedRequest, first_position: int, count: int) -> PromptLogprobs:
    positions = np.arange(first_position, first_position + count, dtype=np.int32)
    columns = columns_of(Line(-float(position), int(position)) for position in positions)
    return PromptLogprobs(owned.key.handle, first_position, positions.tolist(), columns)


def reported(outgoing: list[Outgoing]) -> list[tuple[int, list[int]]]:
    entries = [entry for each in outgoing for entry in each.prompt_logprobs]
    return [(entry.first_position, entry.columns.chosen_ranks.tolist()) for entry in entries]


@pytest.mark.parametrize("durable", [False, True])
def test_log_probabilities_of_a_prompt_that_is_computed_again_are_sent_once(bench, durable):
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection, durable=durable)
    for first_position, count in ((1, 3), (1, 3), (2, 1), (2, 4), (6, 2), (1, 7)):
        bench.requests.deliver_prompt_logprobs([prompt_report(owned, first_position, count)])
    assert reported(take_all(connection)) == [(1, [1, 2, 3]), (4, [4, 5]), (6, [6, 7])]


def test_log_probabilities_of_a_prompt_go_on_where_the_reader_is(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    bench.requests.deliver_prompt_logprobs([prompt_report(owned, 1, 3)])
    bench.requests.close(first)
    bench.requests.deliver_prompt_logprobs([prompt_report(owned, 4, 2)])
    second = bench.connect()
    bench.resubmit(make_request(3), second, Held({}, frozenset(), 3))
    assert reported(take_all(second)) == [(3, [3]), (4, [4, 5])]
    bench.requests.taken(second, 1)
    bench.requests.close(second)
    assert bench.resubmit(make_request(3), bench.connect(), Held({}, frozenset(), 2)) is None


# How long it is kept.


def test_without_a_reader_a_request_ends_after_its_grace_period(bench):
    first = bench.connect()
    bench.admit(make_request(3), first)
    bench.requests.close(first)
    bench.timers.pass_time(GRACE_S - 1)
    assert bench.core.live
    bench.timers.pass_time(1)
    assert not bench.core.live
    assert len(bench.requests) == 0


def test_a_reader_that_is_back_in_time_stops_the_clock(bench):
    first = bench.connect()
    bench.admit(make_request(3), first)
    bench.requests.close(first)
    bench.timers.pass_time(GRACE_S - 1)
    bench.resubmit(make_request(3), bench.connect(), has(0))
    bench.timers.pass_time(2 * GRACE_S)
    assert bench.core.live


def test_a_durable_request_that_ends_unread_is_kept_for_the_whole_time_from_its_end_on(bench):
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection, durable=True)
    bench.requests.detach(owned)
    bench.timers.pass_time(59)
    bench.step(owned, ends=True)
    bench.timers.pass_time(59)
    assert bench.requests.find(owned.tenant, owned.request_id) is owned
    bench.timers.pass_time(1)
    assert len(bench.requests) == 0


def test_outputs_that_no_tokenizer_reads_any_more_are_dropped_and_what_runs_is_not(bench):
    connection = bench.connect()
    over, running = (bench.admit(make_request(handle), connection, durable=True) for handle in (1, 2))
    bench.step(over, ends=True)
    bench.requests.forget_outputs()
    assert len(bench.requests) == 1
    assert bench.requests.find(running.tenant, running.request_id) is running


def test_what_a_gateway_does_not_submit_again_ends_and_what_others_read_does_not(bench):
    first, other = bench.connect(), bench.connect("gateway-b")
    for handle in (1, 2):
        bench.admit(make_request(handle), first)
    bench.admit(make_request(3), first, durable=True)
    bench.admit(make_request(4), other)
    bench.requests.close(first)
    second = bench.connect()
    bench.resubmit(make_request(2), second, has(0))
    bench.requests.end_unread("gateway-a")
    assert bench.requests.num_unread == 1
    assert len(bench.core.live) == 3
    assert bench.resubmit(make_request(1), second, has(0)) is None


def test_of_what_ended_unread_only_so_much_is_kept_and_the_oldest_goes_first(bench, monkeypatch):
    monkeypatch.setattr(table, "MAX_UNDELIVERED", 5)
    first = bench.connect()
    owned = [bench.admit(make_request(handle), first) for handle in range(4)]
    bench.requests.close(first)
    for each in owned:
        bench.step(each)
        bench.step(each, ends=True)
    second = bench.connect()
    found = [bench.resubmit(make_request(handle), second, has(0)) is not None for handle in range(4)]
    assert found == [False, False, True, True]


def test_nothing_is_kept_of_a_request_that_was_read_to_its_end(bench):
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection)
    for _ in range(50):
        bench.step(owned)
        connection.outbox.poll()
        bench.requests.taken(connection, connection.outbox.num_sent)
        assert owned.history.size == 0
        assert not connection.outbox.untaken()
    bench.step(owned, ends=True)
    connection.outbox.poll()
    assert len(bench.requests) == 1
    bench.requests.taken(connection, connection.outbox.num_sent)
    assert len(bench.requests) == 0
    assert not connection.reads


def test_messages_that_were_never_sent_cannot_be_taken_in(bench):
    with pytest.raises(ValueError, match="1 messages were taken in, 0 were sent"):
        bench.requests.taken(bench.connect(), 1)


def test_a_handle_in_use_is_refused_and_one_that_is_free_is_not(bench):
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection)
    with pytest.raises(AlreadyExists, match="handle 3"):
        bench.admit(make_request(3), connection, nonce=8)
    bench.step(owned, ends=True)
    bench.admit(make_request(3), connection, nonce=8)


# Whose it is.


def test_whoever_takes_over_under_a_handle_in_use_takes_nothing(bench):
    first, second = bench.connect(), bench.connect("gateway-b")
    durable = bench.admit(make_request(3), first, durable=True)
    bench.admit(make_request(4), second)
    with pytest.raises(AlreadyExists):
        bench.requests.attach(durable, Reader(second, Handle(4)), Held())
    assert durable.reader == Reader(first, Handle(3))
    assert bench.requests.num_unread == 0


def test_another_gateway_does_not_get_a_plain_request(bench):
    bench.admit(make_request(3), first := bench.connect("gateway-a"))
    bench.requests.close(first)
    assert bench.resubmit(make_request(3), bench.connect("gateway-b"), has(0)) is None
    assert len(bench.core.live) == 1


def test_a_plain_request_is_found_by_its_gateway_alone_and_not_by_its_id(bench):
    bench.admit(make_request(3, tenant="a"), bench.connect())
    with pytest.raises(NotFound):
        bench.requests.find("a", "request-3")


def test_whoever_reads_a_durable_request_takes_over_and_the_one_before_is_told(bench):
    first, second = bench.connect("gateway-a"), bench.connect("gateway-b")
    owned = bench.admit(make_request(3), first, durable=True)
    bench.step(owned)
    bench.requests.attach(owned, Reader(second, Handle(9)), Held())
    bench.step(owned)
    assert offsets_of(take_all(second), 9) == [0, 1]
    ((_, error),) = [refusal for each in take_all(first) for refusal in each.refusals]
    assert error.reason == "REQUEST_TAKEN_OVER"
    with pytest.raises(Aborted):
        bench.resubmit(make_request(3), bench.connect("gateway-a"), has(1))


def test_a_broken_stream_does_not_disturb_the_new_one(bench):
    first = bench.connect()
    owned = bench.admit(make_request(3), first)
    bench.requests.close(first)
    second = bench.connect()
    bench.resubmit(make_request(3), second, has(0))
    bench.requests.close(first)
    bench.requests.taken(first, first.outbox.num_sent)
    bench.step(owned)
    assert offsets_of(take_all(second), 3) == [0]
    assert not bench.timers.pending


def make_cancelled(bench: Bench, handle: int, tenant: str = "a", *, durable: bool = True) -> Request:
    """A request that ran and was cancelled."""
    request = make_request(handle, tenant=tenant)
    bench.admit(request, bench.connect(), durable=durable)
    assert bench.requests.cancel(tenant, request.request_id)
    return request


@pytest.mark.parametrize("durable", [False, True])
def test_one_that_was_cancelled_is_refused_however_often_it_is_submitted_again(bench, durable):
    request = make_cancelled(bench, 1, durable=durable)
    for _ in range(3):
        with pytest.raises(Cancelled, match="request-1"):
            bench.resubmit(request, bench.connect(), has(0))


def test_it_is_that_of_the_tenant_alone(bench):
    request = make_cancelled(bench, 1, tenant="a")
    assert bench.resubmit(dataclasses.replace(request, tenant="b"), bench.connect(), has(0)) is None


def test_a_new_one_under_its_id_is_another_one(bench):
    request = make_cancelled(bench, 1)
    admitted = bench.admit(request, bench.connect(), durable=True)
    assert bench.resubmit(request, bench.connect(), has(0)) is admitted


def test_a_resubmission_with_another_nonce_is_another_request(bench):
    """An id may be used again once its request is over."""
    request = make_cancelled(bench, 1)
    assert bench.resubmit(request, bench.connect(), has(0), nonce=NONCE + 1) is None
    bench.admit(request, bench.connect("gateway-b"), durable=True)
    assert bench.resubmit(request, bench.connect(), has(0), nonce=NONCE + 1) is None


def is_refused(bench: Bench, request: Request) -> bool:
    try:
        return bench.resubmit(request, bench.connect(), has(0)) is not None
    except Cancelled:
        return True


def test_only_the_newest_that_were_cancelled_are_remembered(bench):
    requests = [make_cancelled(bench, handle) for handle in range(MAX_CANCELLED + 2)]
    assert [is_refused(bench, each) for each in requests] == [False, False] + [True] * MAX_CANCELLED


def test_one_that_is_cancelled_twice_counts_from_the_second_time(bench):
    first = make_cancelled(bench, 0)
    for handle in range(1, MAX_CANCELLED):
        make_cancelled(bench, handle)
    make_cancelled(bench, 0)
    make_cancelled(bench, MAX_CANCELLED)
    assert is_refused(bench, first)


def test_an_id_that_nobody_has_is_not_remembered(bench):
    assert not bench.requests.cancel("a", "request-1")
    assert bench.resubmit(make_request(1, tenant="a"), bench.connect(), has(0)) is None


def test_a_sequence_that_ended_under_an_earlier_scheduler_is_replayed_with_its_end(bench):
    request = dataclasses.replace(
        make_request(1, max_tokens=3, num_sequences=4, stop=frozenset({42})),
        emitted=[
            EmittedSequence([7, 42], has_ended=True),
            EmittedSequence([1, 2, 3], has_ended=True),
            # By a stop string, which each gateway finds by itself.
            EmittedSequence([5], has_ended=True),
            EmittedSequence([8, 6]),
        ],
    )
    owned = bench.admit(request, bench.connect(), durable=True)
    second = bench.connect("gateway-b")
    bench.requests.attach(owned, Reader(second, Handle(9)), Held())
    ((batch,),) = [each.batches for each in take_all(second)]
    assert batch.token_ids == [7, 42, 1, 2, 3, 5, 8, 6]
    assert batch.finished == [
        SequenceEnd(Handle(9), 0, 2, FinishReason.STOP, 42),
        SequenceEnd(Handle(9), 1, 3, FinishReason.LENGTH, None),
        SequenceEnd(Handle(9), 2, 1, FinishReason.LENGTH, None),
    ]


# In any order.


@dataclass
class Gateway:
    """What a gateway does with one request: takes each token once, and submits it again on each new stream."""

    request: Request
    is_durable: bool
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_completed: int = 0
    owned: OwnedRequest | None = None

    def take(self, outgoing: Outgoing) -> None:
        for batch in outgoing.batches:
            logprobs = batch.logprobs.columns().chosen_logprobs.tolist()
            assert batch.with_logprobs == list(range(len(batch.handles)))
            for event, (handle, offset) in enumerate(zip(batch.handles, batch.offsets, strict=True)):
                if handle == self.request.key.handle:
                    assert offset == len(self.tokens), "a token was lost or repeated"
                    self.tokens.append(batch.token_ids[event])
                    self.logprobs.append(logprobs[event])
            for end in batch.completed:
                if end.handle == self.request.key.handle:
                    self.num_completed += 1


class ReadersComeAndGo(RuleBasedStateMachine):
    """Three requests of one gateway, whose stream breaks and comes back at any time, messages on their way or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench()
        self.gateways = [Gateway(make_request(handle, tenant="a"), handle == 0) for handle in range(3)]
        self.connection = self.bench.connect(credit=2)
        self.num_taken = 0
        self.in_transit: list[Outgoing] = []
        for each in self.gateways:
            each.owned = self.bench.admit(each.request, self.connection, durable=each.is_durable)

    @property
    def live(self) -> list[OwnedRequest]:
        return [
            each.owned for each in self.gateways if each.owned is not None and each.owned.key in self.bench.core.live
        ]

    @rule(chosen=st.sets(st.integers(0, 2)), ends=st.booleans())
    def step(self, chosen: set[int], ends: bool) -> None:
        owned = [owned for number in chosen if (owned := self.gateways[number].owned) in self.live]
        if owned:
            self.bench.step(*owned, ends=ends, with_logprobs=True)

    @rule()
    def send(self) -> None:
        outgoing = self.connection.outbox.poll()
        if outgoing is not None:
            self.in_transit.append(outgoing)

    @precondition(lambda self: self.in_transit)
    @rule(acknowledges=st.booleans())
    def receive(self, acknowledges: bool) -> None:
        outgoing = self.in_transit.pop(0)
        self.num_taken += 1
        for each in self.gateways:
            each.take(outgoing)
        if acknowledges:
            self.bench.requests.taken(self.connection, self.num_taken)
            self.connection.outbox.add_credit(1)

    @rule(num_arriving=st.integers(0, 2), is_noticed=st.booleans())
    def reconnect(self, num_arriving: int, is_noticed: bool) -> None:
        """Some of what is on its way still arrives; the scheduler may hear of the new stream first."""
        for _ in range(min(num_arriving, len(self.in_transit))):
            self.receive(acknowledges=False)
        self.in_transit.clear()
        if is_noticed:
            self.bench.requests.close(self.connection)
            self.step({0, 1, 2}, ends=False)
        self.bench.requests.close(self.connection)
        self.connection, self.num_taken = self.bench.connect(credit=2), 0
        for each in self.gateways:
            if each.num_completed:
                continue
            held = has(len(each.tokens))
            found = self.bench.resubmit(each.request, self.connection, held)
            assert found is each.owned, "what it has generated is lost"
        self.bench.requests.end_unread("gateway-a")

    @invariant()
    def each_request_is_kept_or_delivered(self) -> None:
        for each in self.gateways:
            assert each.tokens == list(range(len(each.tokens)))
            assert each.logprobs == [-float(token_id) for token_id in each.tokens]
            assert each.num_completed <= 1

    def teardown(self) -> None:
        self.bench.step(*self.live, ends=True, with_logprobs=True)
        self.connection.outbox.add_credit(1000)
        self.in_transit += take_all(self.connection)
        while self.in_transit:
            self.receive(acknowledges=True)
        self.bench.requests.taken(self.connection, self.num_taken)
        assert all(each.num_completed == 1 for each in self.gateways)
        assert not self.connection.outbox.untaken()
        self.bench.timers.pass_time(100)
        assert len(self.bench.requests) == 0
        assert not self.bench.timers.pending


TestReadersComeAndGo = ReadersComeAndGo.TestCase
TestReadersComeAndGo.settings = settings(stateful_step_count=30, deadline=None)


def fill(bench: Bench, connection: Connection, tenant: str, **fields) -> int:
    """Admits durable requests of a tenant until one is refused; returns how many were taken."""
    first = len(bench.requests)
    for handle in itertools.count(1000 * (1 + first)):
        try:
            bench.admit(make_request(handle, tenant=tenant, **fields), connection, durable=True)
        except ResourceExhausted:
            return len(bench.requests) - first
    raise AssertionError("unreachable")


def test_a_durable_request_counts_for_what_it_has_and_may_soon_have_and_not_for_its_limit():
    """Without max_tokens a request may have as many as the model allows: each counted for 32,000, and 61 filled all."""
    bench = Bench(limits=DurableLimits(1024, 2_000_000, 60.0))
    assert fill(bench, bench.connect(), "a", prompt_len=100, max_tokens=32_000) == 1024
    assert bench.requests.num_durable_tokens == 1024 * (100 + MAX_GROWTH)


def test_what_a_durable_request_gets_leaves_less_room_and_is_kept_however_much_it_is(bench):
    connection = bench.connect(credit=10**6)
    bench.requests = Requests(
        bench.core.abort, bench.core.progress, DurableLimits(8, 3000, 60.0), bench.timers.call_later
    )
    first = bench.admit(make_request(1, prompt_len=10, max_tokens=10_000), connection, durable=True)
    assert bench.requests.num_durable_tokens == 10 + MAX_GROWTH
    for _ in range(2500):
        bench.step(first)
    assert bench.requests.num_durable_tokens == 10 + 2500 + MAX_GROWTH
    with pytest.raises(ResourceExhausted, match=r"3\d\d\d tokens of durable requests would be kept; .* room for 3000"):
        bench.admit(make_request(2, prompt_len=10, max_tokens=1), connection, durable=True)
    bench.step(first, ends=True)
    assert bench.requests.num_durable_tokens == 10 + 2501
    assert bench.requests.find("", "request-1").history.num_tokens == 2501
    # What is over makes room.
    bench.admit(make_request(2, prompt_len=10, max_tokens=600), connection, durable=True)
    with pytest.raises(NotFound):
        bench.requests.find("", "request-1")


def test_a_tenant_that_keeps_as_much_as_it_may_leaves_others_an_equal_share(bench):
    connection = bench.connect()
    assert fill(bench, connection, "a") == 8
    assert fill(bench, connection, "b") == 4
    assert fill(bench, connection, "c") == 2
    with pytest.raises(
        ResourceExhausted, match=r"5 durable requests would run of this tenant; .* 3 tenants .* has 2$"
    ) as caught:
        bench.admit(make_request(9, tenant="b"), connection, durable=True)
    assert (caught.value.reason, caught.value.retry_after_ms) == ("DURABLE_LIMIT", 1000)


@pytest.mark.parametrize("limits", [DurableLimits(0, 10_000, 60.0), DurableLimits(8, 10, 60.0)])
def test_where_no_durable_request_has_room_none_is_taken(limits):
    bench = Bench(limits=limits)
    with pytest.raises(ResourceExhausted, match="1 durable request would be kept, with 11 tokens; at most"):
        bench.admit(make_request(1), bench.connect(), durable=True)


def test_arrivals_between_two_steps_sum_up_what_is_kept_once(bench, monkeypatch):
    connection = bench.connect()
    owned = [bench.admit(make_request(handle), connection, durable=True) for handle in range(3)]
    bench.step(*owned)
    sums = []
    charge = Durable.charge
    monkeypatch.setattr(Durable, "charge", lambda self, *args, **kw: sums.append(self) or charge(self, *args, **kw))
    for handle in range(3, 7):
        bench.admit(make_request(handle), connection, durable=True)
    # The three that were there, and for each of four that it has room and what it takes.
    assert len(sums) == 3 + 2 * 4
