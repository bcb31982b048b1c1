"""The table of requests: which gateways may read and take over a request, what a gateway gets when it comes back, how
long and how much of a request is kept without a reader, and what stays of a cancelled one. Worlds break streams in any
order, and compare every event."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.messages.logprob_columns import LogprobColumns
from quire.rpc.errors import AlreadyExists, Cancelled, NotFound, ResourceExhausted, Unavailable
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.request import EmittedSequence, Handle, Request, RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, RequestEnd, SequenceEnd, Usage
from scheduler_svc.service import kept_requests
from scheduler_svc.service.gateway_messages import gateway_messages
from scheduler_svc.service.history import Held, PromptLogprobs, SequenceProgress
from scheduler_svc.service.kept_requests import MAX_CANCELLED, DurableLimits
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.readers import MAX_GROWTH, Connection, OwnedRequest, Reader
from scheduler_svc.service.requests import AlreadyTakenOver, Requests
from scheduler_svc.service.scheduler_servicer import SchedulerServicer
from tests.support.core_driver import make_config, make_request
from tests.support.step_loop import make_step_loop

NONCE = 7
GRACE_S = 10.0
NO_USAGE = Usage(1, 0, 0, 0, 0.0, 0.0, 0.0)


class Timers:
    """Calls that fire when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pending: dict[int, tuple[float, Callable[[], object]]] = {}
        self._numbers = itertools.count()

    def call_later(self, seconds: float, call: Callable[[], object]) -> Any:
        number = next(self._numbers)
        self.pending[number] = self.now + seconds, call
        return SimpleNamespace(cancel=lambda: self.pending.pop(number, None))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for number, (at, call) in list(self.pending.items()):
            if at <= self.now and self.pending.pop(number, None):
                call()


@dataclass
class Core:
    """The part of the core that the table uses: live requests by their keys, with the progress of their sequences."""

    live: dict[RequestKey, list[SequenceProgress]] = field(default_factory=dict)

    def abort(self, key: RequestKey) -> bool:
        return self.live.pop(key, None) is not None

    def progress(self, key: RequestKey) -> list[SequenceProgress] | None:
        return self.live.get(key)


@dataclass
class Bench:
    """A table with a core and timers that the test controls."""

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
        self,
        request: Request,
        connection: Connection,
        *,
        durable: bool = False,
        nonce: int = NONCE,
        refusal: Exception | None = None,
    ) -> OwnedRequest:
        """Admits a request; the core refuses it if there is a `refusal`."""

        def submit(admitted: Request) -> None:
            if refusal is not None:
                raise refusal
            emitted = admitted.emitted or [EmittedSequence(())] * admitted.num_returned
            progress = [SequenceProgress(i, len(each.token_ids), each.has_ended) for i, each in enumerate(emitted)]
            self.core.live[admitted.key] = progress

        reader = Reader(connection, request.key.handle)
        self.requests.admit(request, nonce, reader, submit, b"" if durable else None)
        owned = reader.request
        assert owned is not None
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


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_durable_request_that_ends_unread_is_kept_for_the_whole_time_from_its_end_on(bench):
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection, durable=True)
    bench.requests.detach(owned)
    bench.timers.pass_time(59)
    bench.step(owned, ends=True)
    bench.timers.pass_time(59)
    assert bench.requests.find_durable(owned.tenant, owned.request_id) is owned
    bench.timers.pass_time(1)
    assert len(bench.requests) == 0


def test_outputs_that_no_tokenizer_reads_any_more_are_dropped_and_what_runs_is_not(bench):
    connection = bench.connect()
    over, running = (bench.admit(make_request(handle), connection, durable=True) for handle in (1, 2))
    bench.step(over, ends=True)
    bench.requests.forget_outputs()
    assert len(bench.requests) == 1
    assert bench.requests.find_durable(running.tenant, running.request_id) is running


@pytest.mark.parametrize(
    "how", ["its time is over", "another has its room", "another tokenizer", "nobody reads it", "a sequence ends"]
)
def test_what_is_forgotten_while_a_reader_is_sent_it_comes_to_its_end_or_to_an_error(bench, monkeypatch, how):
    monkeypatch.setattr("scheduler_svc.service.history._REPLAYED_AT_ONCE", 2)
    first, second = bench.connect(), bench.connect("gateway-b", credit=1)
    owned = bench.admit(make_request(3), first, durable=True)
    for number in range(7):
        bench.step(owned, ends=number == 6)
    bench.requests.attach(owned, Reader(second, Handle(9)), Held())
    sent = take_all(second)
    assert offsets_of(sent, 9) == [0, 1]
    if how == "another has its room":
        for handle in range(10, 18):
            bench.admit(make_request(handle), first, durable=True)
    elif how == "another tokenizer":
        bench.requests.forget_outputs()
    else:
        bench.requests.forget(owned)
    abort = scheduler_pb2.Abort(handle=9, wants_usage=True)
    if how == "a sequence ends":
        # The gateway found a stop string; the missing tokens of the other sequences are still to come.
        abort.sequence_index = 1
    if how in ("nobody reads it", "a sequence ends"):
        loop, _ = make_step_loop(Scheduler(make_config()))
        SchedulerServicer(loop, bench.requests)._abort(abort, Reader(second, Handle(9)))
    assert Reader(second, Handle(9)).request is None
    second.outbox.add_credit(100)
    rest = take_all(second)
    if how == "another tokenizer":
        assert [error.reason for each in rest for _, error in each.refusals] == ["MODEL_CHANGED"]
    if how in ("another tokenizer", "nobody reads it"):
        assert offsets_of(rest, 9) == ends_of(rest) == []
    else:
        assert offsets_of(rest, 9) == [2, 3, 4, 5, 6]
        assert 9 in ends_of(rest)
    with pytest.raises(NotFound):
        bench.requests.find_durable(owned.tenant, owned.request_id)


def test_a_stop_string_that_ends_a_request_leaves_its_reader_what_it_lacks_of_other_sequences(bench, monkeypatch):
    monkeypatch.setattr("scheduler_svc.service.history._REPLAYED_AT_ONCE", 2)
    second = bench.connect("gateway-b", credit=1)
    owned = bench.admit(make_request(3), bench.connect(), durable=True)
    for _ in range(7):
        bench.step(owned)
    bench.requests.attach(owned, Reader(second, Handle(9)), Held())
    assert offsets_of(take_all(second), 9) == [0, 1]
    loop, _ = make_step_loop(Scheduler(make_config()))
    usages = iter([NO_USAGE, None])
    monkeypatch.setattr(loop.replica, "usage_so_far", lambda key: next(usages))
    monkeypatch.setattr(loop.replica, "abort_sequence", lambda key, index: None)
    abort = scheduler_pb2.Abort(handle=9, sequence_index=1, wants_usage=True)
    SchedulerServicer(loop, bench.requests)._abort(abort, Reader(second, Handle(9)))
    second.outbox.add_credit(100)
    rest = take_all(second)
    assert offsets_of(rest, 9) == [2, 3, 4, 5, 6]
    assert ends_of(rest) == [9]
    assert not any(each.aborted for each in rest)


def test_of_what_ended_unread_only_so_much_is_kept_and_the_oldest_goes_first(bench, monkeypatch):
    monkeypatch.setattr(kept_requests, "MAX_UNDELIVERED", 5)
    first = bench.connect()
    owned = [bench.admit(make_request(handle), first) for handle in range(4)]
    bench.requests.close(first)
    for each in owned:
        bench.step(each)
        bench.step(each, ends=True)
    second = bench.connect()
    found = [bench.resubmit(make_request(handle), second, has(0)) is not None for handle in range(4)]
    assert found == [False, False, True, True]


def test_messages_that_were_never_sent_cannot_be_taken_in(bench):
    with pytest.raises(ValueError, match="1 messages were taken in, 0 were sent"):
        bench.requests.acknowledge(bench.connect(), 1)


def test_a_handle_in_use_is_refused_and_one_that_is_free_is_not(bench):
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection, durable=True)
    with pytest.raises(AlreadyExists, match="handle 3"):
        bench.admit(make_request(3), connection, nonce=8)
    bench.step(owned, ends=True)
    bench.admit(make_request(3), connection, nonce=8)
    # The durable request stays for resumption.
    assert len(bench.requests) == 2


def fill(bench: Bench, connection: Connection, tenant: str, **fields) -> int:
    """Admits durable requests of a tenant until one is refused; returns the number of accepted ones."""
    first = len(bench.requests)
    for handle in itertools.count(1000 * (1 + first)):
        try:
            bench.admit(make_request(handle, tenant=tenant, **fields), connection, durable=True)
        except ResourceExhausted:
            return len(bench.requests) - first
    raise AssertionError("unreachable")


def test_a_durable_request_counts_for_what_it_has_and_may_soon_have_and_not_for_its_limit():
    """Without max_tokens a request may have the model's maximum: each counted for 32,000, and 61 filled the table."""
    bench = Bench(limits=DurableLimits(1024, 2_000_000, 60.0))
    assert fill(bench, bench.connect(), "a", prompt_len=100, max_tokens=32_000) == 1024
    assert bench.requests.durable.num_tokens == 1024 * (100 + MAX_GROWTH)


def test_what_a_durable_request_gets_leaves_less_room_and_is_kept_however_much_it_is(bench):
    connection = bench.connect(credit=10**6)
    bench.requests = Requests(
        bench.core.abort, bench.core.progress, DurableLimits(8, 3000, 60.0), bench.timers.call_later
    )
    first = bench.admit(make_request(1, prompt_len=10, max_tokens=10_000), connection, durable=True)
    assert bench.requests.durable.num_tokens == 10 + MAX_GROWTH
    for _ in range(2500):
        bench.step(first)
    assert bench.requests.durable.num_tokens == 10 + 2500 + MAX_GROWTH
    with pytest.raises(ResourceExhausted, match=r"3\d\d\d tokens of durable requests would be kept; .* room for 3000"):
        bench.admit(make_request(2, prompt_len=10, max_tokens=1), connection, durable=True)
    bench.step(first, ends=True)
    assert bench.requests.durable.num_tokens == 10 + 2501
    assert bench.requests.find_durable("", "request-1").history.num_tokens == 2501
    # Requests that are over make room.
    bench.admit(make_request(2, prompt_len=10, max_tokens=600), connection, durable=True)
    with pytest.raises(NotFound):
        bench.requests.find_durable("", "request-1")


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


@pytest.mark.parametrize("limits", [DurableLimits(8, 10**6, 60.0), DurableLimits(1000, 8 * 11, 60.0)])
def test_a_tenant_that_floods_makes_room_for_it_from_its_own_requests_that_are_over(limits):
    """With either limit, of requests or of tokens. The request of the other tenant is the oldest of all."""
    bench = Bench(limits=limits)
    connection = bench.connect()
    kept = bench.admit(make_request(1, prompt_len=5, max_tokens=6, tenant="quiet"), connection, durable=True)
    bench.step(*[kept] * 5)
    bench.step(kept, ends=True)
    for handle in range(2, 22):
        owned = bench.admit(make_request(handle, prompt_len=5, max_tokens=6, tenant="flood"), connection, durable=True)
        bench.step(*[owned] * 5)
        bench.step(owned, ends=True)
    assert len(bench.requests.durable.requests) == 8
    assert bench.requests.find_durable("quiet", "request-1") is kept
    for handle in range(2, 15):
        with pytest.raises(NotFound):
            bench.requests.find_durable("flood", f"request-{handle}")


def test_room_for_a_tenant_that_holds_little_comes_from_the_one_that_holds_most():
    bench = Bench(limits=DurableLimits(10, 10**6, 60.0))
    connection = bench.connect()
    for handle, tenant in enumerate("abbbbccccc"):
        bench.step(bench.admit(make_request(handle, tenant=tenant), connection, durable=True), ends=True)
    for handle in (10, 11):
        bench.admit(make_request(handle, tenant="a"), connection, durable=True)
    assert len(bench.requests.durable.requests) == 10
    for tenant, handle in (("c", 5), ("b", 1)):
        with pytest.raises(NotFound):
            bench.requests.find_durable(tenant, f"request-{handle}")


@pytest.mark.parametrize("limits", [DurableLimits(0, 10_000, 60.0), DurableLimits(8, 10, 60.0)])
def test_where_no_durable_request_has_room_none_is_taken(limits):
    bench = Bench(limits=limits)
    with pytest.raises(ResourceExhausted, match="1 durable request would be kept, with 11 tokens; at most"):
        bench.admit(make_request(1), bench.connect(), durable=True)


def test_a_durable_request_that_is_refused_leaves_what_is_kept_of_an_earlier_one_of_its_id():
    bench = Bench(limits=DurableLimits(8, 1100, 60.0))
    connection = bench.connect()
    earlier = bench.admit(make_request(1), connection, durable=True)
    bench.step(earlier, ends=True)
    bench.admit(make_request(2, max_tokens=1000), connection, durable=True)
    assert bench.requests.find_durable("", "request-1") is earlier
    again = replace(make_request(3, max_tokens=500), request_id="request-1")
    with pytest.raises(ResourceExhausted):
        bench.admit(again, connection, durable=True)
    assert bench.requests.find_durable("", "request-1") is earlier


def test_what_is_kept_stays_where_the_queue_has_no_room_for_a_durable_request():
    bench = Bench(limits=DurableLimits(2, 10_000, 60.0))
    connection = bench.connect()
    kept = [bench.admit(make_request(handle), connection, durable=True) for handle in (1, 2)]
    bench.step(*kept, ends=True)
    for request in (make_request(3), replace(make_request(3), request_id="request-2")):
        with pytest.raises(ResourceExhausted, match="full"):
            bench.admit(request, connection, durable=True, refusal=ResourceExhausted("the queue is full"))
        assert Reader(connection, Handle(3)).request is None
        assert [bench.requests.find_durable("", each.request_id) for each in kept] == kept
    admitted = bench.admit(request, connection, durable=True)
    assert bench.requests.find_durable("", admitted.request_id).request_id == "request-2"
    assert len(bench.requests.durable.requests) == 2


def test_durable_requests_that_have_grown_beyond_the_limit_go_on_at_a_scheduler_that_starts_anew():
    """The earlier scheduler accepted them, and kept more than the limit. Refused ones would come back forever."""
    bench = Bench(limits=DurableLimits(2, 3000, 60.0))
    connection = bench.connect()
    over = bench.admit(make_request(9), connection, durable=True)
    bench.step(over, ends=True)
    for handle in (1, 2, 3):
        request = make_request(handle, max_tokens=10_000, emitted=tuple(range(2500)))
        bench.admit(replace(request, accepted_before=True), connection, durable=True)
    assert len(bench.core.live) == len(bench.requests.durable.requests) == 3
    with pytest.raises(ResourceExhausted):
        bench.admit(make_request(4), connection, durable=True)


def test_whoever_takes_over_under_a_handle_in_use_takes_nothing(bench):
    first, second = bench.connect(), bench.connect("gateway-b")
    durable = bench.admit(make_request(3), first, durable=True)
    bench.admit(make_request(4), second)
    with pytest.raises(AlreadyExists):
        bench.requests.attach(durable, Reader(second, Handle(4)), Held())
    assert durable.reader == Reader(first, Handle(3))
    assert bench.requests.num_unread == 0


def test_one_that_is_on_its_way_to_another_scheduler_is_not_unknown(bench):
    """A caller that asks all schedulers would take it for one that is over, and it would run on."""
    connection = bench.connect()
    owned = bench.admit(make_request(3), connection, durable=True)
    assert owned.durable is not None
    assert bench.requests.move(Reader(connection, Handle(3)), lambda key: KvSource())
    for ask in (bench.requests.find_durable, bench.requests.cancel):
        with pytest.raises(Unavailable, match="request-3"):
            ask("", "request-3")
    assert not bench.requests.cancel("b", "request-3")
    bench.timers.pass_time(0.5)
    # It came back, and left again.
    again = bench.admit(replace(make_request(5), request_id="request-3"), connection)
    assert bench.requests.move(Reader(connection, Handle(5)), lambda key: KvSource())
    assert again.is_over
    bench.timers.pass_time(0.75)
    with pytest.raises(Unavailable):
        bench.requests.find_durable("", "request-3")
    bench.timers.pass_time(0.25)
    with pytest.raises(NotFound):
        bench.requests.find_durable("", "request-3")
    assert not bench.requests.cancel("", "request-3")


def test_a_gateway_learns_whether_its_request_was_taken_over_before_or_after_it_submitted_it_again(bench):
    first, second = bench.connect(), bench.connect("gateway-b")
    request = make_request(1)
    owned = bench.admit(request, first, durable=True)
    bench.requests.attach(owned, Reader(second, Handle(7)), has(0))
    (taken,) = [message.events.failed[0] for outgoing in take_all(first) for message in gateway_messages(outgoing)]
    assert (taken.reason, taken.already_taken_over) == ("REQUEST_TAKEN_OVER", False)
    with pytest.raises(AlreadyTakenOver, match="read by another call") as refused:
        bench.resubmit(request, first, has(0))
    first.outbox.put_refusal(Handle(1), refused.value)
    (refusal,) = [message.events.failed[0] for outgoing in take_all(first) for message in gateway_messages(outgoing)]
    assert (refusal.reason, refusal.already_taken_over) == ("REQUEST_TAKEN_OVER", True)


def cancel(bench: Bench, handle: int, tenant: str = "a", *, durable: bool = True) -> Request:
    """Runs a request and cancels it."""
    request = make_request(handle, tenant=tenant)
    bench.admit(request, bench.connect(), durable=durable)
    assert bench.requests.cancel(tenant, request.request_id)
    return request


@pytest.mark.parametrize("durable", [False, True])
def test_one_that_was_cancelled_is_refused_to_its_tenant_and_another_of_its_id_is_not(bench, durable):
    request = cancel(bench, 1, durable=durable)
    for _ in range(3):
        with pytest.raises(Cancelled, match="request-1"):
            bench.resubmit(request, bench.connect(), has(0))
    assert bench.resubmit(replace(request, tenant="b"), bench.connect(), has(0)) is None
    # Another nonce makes another request.
    assert bench.resubmit(request, bench.connect(), has(0), nonce=NONCE + 1) is None
    admitted = bench.admit(request, bench.connect(), durable=True, nonce=NONCE + 1)
    assert bench.resubmit(request, bench.connect(), has(0), nonce=NONCE + 1) is admitted
    with pytest.raises(Cancelled, match="request-1"):
        bench.resubmit(request, bench.connect(), has(0))


@pytest.mark.parametrize("has_offer", [True, False])
def test_a_request_that_arrives_after_its_offer_was_cancelled_is_refused(bench, has_offer):
    """Its gateway sent it before it learned that the tenant had cancelled it."""
    connection, request = bench.connect(), make_request(1)
    bench.admit(replace(request, is_offer=True), connection)
    assert bench.requests.cancel(request.tenant, request.request_id)
    with pytest.raises(Cancelled, match="request-1"):
        bench.admit(replace(request, is_offer=has_offer), connection)
    assert not bench.core.live
    assert len(bench.requests) == 0


def test_only_the_newest_that_were_cancelled_are_remembered(bench):
    def is_refused(request: Request) -> bool:
        try:
            return bench.resubmit(request, bench.connect(), has(0)) is not None
        except Cancelled:
            return True

    requests = [cancel(bench, handle) for handle in range(MAX_CANCELLED)]
    # A request that is refused again counts from its cancellation, not from its refusal.
    assert is_refused(requests[0])
    requests += [cancel(bench, handle) for handle in range(MAX_CANCELLED, MAX_CANCELLED + 2)]
    assert [is_refused(each) for each in requests] == [False, False] + [True] * MAX_CANCELLED
    # A forgotten request can be submitted and cancelled again, and then it is the newest.
    cancel(bench, 0)
    assert [is_refused(each) for each in requests] == [True, False, False] + [True] * (MAX_CANCELLED - 1)


def test_a_handle_that_stands_for_another_request_by_now_does_not_mix_their_tokens(bench):
    first = bench.connect()
    earlier = bench.admit(make_request(3), first, nonce=1)
    bench.step(earlier, ends=True)
    take_all(first)
    later = bench.admit(make_request(3), first, nonce=2)
    bench.step(later)
    bench.requests.close(first)
    assert bench.resubmit(make_request(3), bench.connect(), has(0), nonce=2) is None


def test_log_probabilities_of_a_prompt_have_no_gap(bench):
    """A chunk that is not finite is not sent; positions after it wait until the prompt is computed again."""
    connection = bench.connect()
    plain = make_request(1)
    prompted = replace(plain, sampling=replace(plain.sampling, prompt_logprobs=0))
    owned = bench.admit(prompted, connection)
    for first, last in ((1, 3), (5, 7), (1, 5), (5, 7)):
        columns = LogprobColumns.of_lines(
            np.full(last - first, -1.5, np.float32),
            np.ones(last - first, np.int32),
            np.zeros((last - first, 0), np.int32),
            np.zeros((last - first, 0), np.float32),
        )
        entry = PromptLogprobs(owned.key.handle, first, range(first, last), columns)
        bench.requests.deliver_prompt_logprobs([entry])
    given = [entry for outgoing in take_all(connection) for entry in outgoing.prompt_logprobs]
    assert [token_id for entry in given for token_id in entry.token_ids] == [1, 2, 3, 4, 5, 6]
