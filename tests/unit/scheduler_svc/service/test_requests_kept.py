"""Who may read a request and who takes it over, how long it is kept without a reader and how much of it, and what stays
of one that was cancelled."""

import itertools
from dataclasses import replace

import pytest

from quire.rpc.errors import Aborted, AlreadyExists, Cancelled, NotFound, ResourceExhausted
from scheduler_svc.core.request import EmittedSequence, Handle, Request
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import SequenceEnd
from scheduler_svc.service import requests as table
from scheduler_svc.service.durable import MAX_GROWTH, DurableLimits
from scheduler_svc.service.outbox import Held
from scheduler_svc.service.requests import MAX_CANCELLED, Connection, Reader, Requests
from tests.support.core_driver import make_request
from tests.support.request_bench import GRACE_S, NONCE, Bench, ends_of, has, offsets_of, take_all


def test_a_plain_request_waits_for_its_gateway_alone_and_for_its_grace_period(bench):
    first = bench.connect()
    bench.admit(make_request(3), first)
    bench.requests.close(first)
    bench.timers.pass_time(GRACE_S - 1)
    assert bench.resubmit(make_request(3), bench.connect("gateway-b"), has(0)) is None
    with pytest.raises(NotFound):
        bench.requests.find("", "request-3")
    # A reader that is back in time stops the clock.
    second = bench.connect()
    assert bench.resubmit(make_request(3), second, has(0)) is not None
    bench.timers.pass_time(2 * GRACE_S)
    assert bench.core.live
    bench.requests.close(second)
    bench.timers.pass_time(GRACE_S - 1)
    assert bench.core.live
    bench.timers.pass_time(1)
    assert not bench.core.live
    assert len(bench.requests) == 0


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


@pytest.mark.parametrize("how", ["its time is over", "another has its room", "another tokenizer", "nobody reads it"])
def test_what_is_forgotten_while_a_reader_is_sent_it_comes_to_its_end_or_to_an_error(bench, monkeypatch, how):
    monkeypatch.setattr("scheduler_svc.service.outbox._REPLAYED_AT_ONCE", 2)
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
    if how == "nobody reads it":
        second.outbox.drop_replay(Handle(9))
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
        bench.requests.find(owned.tenant, owned.request_id)


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
    owned = bench.admit(make_request(3), connection, durable=True)
    with pytest.raises(AlreadyExists, match="handle 3"):
        bench.admit(make_request(3), connection, nonce=8)
    bench.step(owned, ends=True)
    bench.admit(make_request(3), connection, nonce=8)
    # The durable one is there for whoever resumes it.
    assert len(bench.requests) == 2


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


@pytest.mark.parametrize("limits", [DurableLimits(8, 10**6, 60.0), DurableLimits(1000, 8 * 11, 60.0)])
def test_a_tenant_that_floods_makes_room_for_it_from_its_own_requests_that_are_over(limits):
    """Whether requests or tokens run out. The one of the other tenant is the oldest of all."""
    bench = Bench(limits=limits)
    connection = bench.connect()
    kept = bench.admit(make_request(1, prompt_len=5, max_tokens=6, tenant="quiet"), connection, durable=True)
    bench.step(*[kept] * 5)
    bench.step(kept, ends=True)
    for handle in range(2, 22):
        owned = bench.admit(make_request(handle, prompt_len=5, max_tokens=6, tenant="flood"), connection, durable=True)
        bench.step(*[owned] * 5)
        bench.step(owned, ends=True)
    assert bench.requests.num_durable == 8
    assert bench.requests.find("quiet", "request-1") is kept
    for handle in range(2, 15):
        with pytest.raises(NotFound):
            bench.requests.find("flood", f"request-{handle}")


def test_room_for_a_tenant_that_holds_little_comes_from_the_one_that_holds_most():
    bench = Bench(limits=DurableLimits(10, 10**6, 60.0))
    connection = bench.connect()
    for handle, tenant in enumerate("abbbbccccc"):
        bench.step(bench.admit(make_request(handle, tenant=tenant), connection, durable=True), ends=True)
    for handle in (10, 11):
        bench.admit(make_request(handle, tenant="a"), connection, durable=True)
    assert bench.requests.num_durable == 10
    for tenant, handle in (("c", 5), ("b", 1)):
        with pytest.raises(NotFound):
            bench.requests.find(tenant, f"request-{handle}")


@pytest.mark.parametrize("limits", [DurableLimits(0, 10_000, 60.0), DurableLimits(8, 10, 60.0)])
def test_where_no_durable_request_has_room_none_is_taken(limits):
    bench = Bench(limits=limits)
    with pytest.raises(ResourceExhausted, match="1 durable request would be kept, with 11 tokens; at most"):
        bench.admit(make_request(1), bench.connect(), durable=True)


def test_durable_requests_that_have_grown_beyond_the_limit_go_on_at_a_scheduler_that_starts_anew():
    """They were accepted by the one before, which kept more than the limit. Refused, the largest came back for ever."""
    bench = Bench(limits=DurableLimits(2, 3000, 60.0))
    connection = bench.connect()
    over = bench.admit(make_request(9), connection, durable=True)
    bench.step(over, ends=True)
    for handle in (1, 2, 3):
        request = make_request(handle, max_tokens=10_000, emitted=tuple(range(2500)))
        bench.admit(replace(request, accepted_before=True), connection, durable=True)
    assert len(bench.core.live) == bench.requests.num_durable == 3
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


def cancel(bench: Bench, handle: int, tenant: str = "a", *, durable: bool = True) -> Request:
    """A request that ran and was cancelled."""
    request = make_request(handle, tenant=tenant)
    bench.admit(request, bench.connect(), durable=durable)
    assert bench.requests.cancel(tenant, request.request_id)
    return request


@pytest.mark.parametrize("durable", [False, True])
def test_one_that_was_cancelled_is_refused_to_its_tenant_until_its_id_is_used_again(bench, durable):
    request = cancel(bench, 1, durable=durable)
    for _ in range(3):
        with pytest.raises(Cancelled, match="request-1"):
            bench.resubmit(request, bench.connect(), has(0))
    assert bench.resubmit(replace(request, tenant="b"), bench.connect(), has(0)) is None
    # With another nonce it is another request.
    assert bench.resubmit(request, bench.connect(), has(0), nonce=NONCE + 1) is None
    admitted = bench.admit(request, bench.connect(), durable=True)
    assert bench.resubmit(request, bench.connect(), has(0)) is admitted
    assert bench.resubmit(request, bench.connect(), has(0), nonce=NONCE + 1) is None


def test_only_the_newest_that_were_cancelled_are_remembered(bench):
    def is_refused(request: Request) -> bool:
        try:
            return bench.resubmit(request, bench.connect(), has(0)) is not None
        except Cancelled:
            return True

    requests = [cancel(bench, handle) for handle in range(MAX_CANCELLED)]
    # One that is cancelled twice counts from the second time.
    cancel(bench, 0)
    requests += [cancel(bench, handle) for handle in range(MAX_CANCELLED, MAX_CANCELLED + 2)]
    assert [is_refused(each) for each in requests] == [True, False, False] + [True] * (MAX_CANCELLED - 1)


def test_a_sequence_that_ended_under_an_earlier_scheduler_is_replayed_with_its_end(bench):
    request = replace(
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
