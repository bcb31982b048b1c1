"""Who may read a request, who takes it over, and what stays of one that was cancelled."""

import dataclasses

import pytest

from quire.rpc.errors import Aborted, AlreadyExists, Cancelled, NotFound
from scheduler_svc.core.request import EmittedSequence, Handle, Request
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import SequenceEnd
from scheduler_svc.service.outbox import Held
from scheduler_svc.service.requests import MAX_CANCELLED, Reader
from tests.support.core_driver import make_request
from tests.support.request_bench import NONCE, Bench, has, offsets_of, take_all


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
