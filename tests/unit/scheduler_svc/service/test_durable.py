"""What is remembered of durable requests that were cancelled."""

import dataclasses

import pytest

from quire.rpc.errors import Cancelled
from scheduler_svc.core.request import Request
from scheduler_svc.service.durable import MAX_CANCELLED, DurableLimits, DurableRequests
from tests.support.core_driver import make_request


@pytest.fixture
def durable() -> DurableRequests:
    return DurableRequests(lambda _: True, DurableLimits(max_requests=8, max_tokens=10_000, grace_s=60.0))


def make_cancelled(durable: DurableRequests, handle: int, tenant: str = "a") -> Request:
    """A request that ran and was cancelled."""
    request = make_request(handle, tenant=tenant)
    durable.admit(request, b"")
    assert durable.cancel(tenant, request.request_id)
    return request


def test_one_that_was_cancelled_is_refused_however_often_it_is_submitted_again(durable):
    request = make_cancelled(durable, 1)
    for _ in range(3):
        with pytest.raises(Cancelled, match="request-1"):
            durable.resubmitted(request, "gateway-a")


def test_it_is_that_of_the_tenant_alone(durable):
    request = make_cancelled(durable, 1, tenant="a")
    assert durable.resubmitted(dataclasses.replace(request, tenant="b"), "gateway-a") is None


def test_a_new_one_under_its_id_is_another_one(durable):
    request = make_cancelled(durable, 1)
    admitted = durable.admit(request, b"")
    assert durable.resubmitted(request, "gateway-a") is admitted


def test_only_the_newest_are_remembered(durable):
    requests = [make_cancelled(durable, handle) for handle in range(MAX_CANCELLED + 2)]
    assert [durable.resubmitted(each, "gateway-a") for each in requests[:2]] == [None, None]
    for each in requests[2:]:
        with pytest.raises(Cancelled):
            durable.resubmitted(each, "gateway-a")


def test_one_that_is_cancelled_twice_counts_from_the_second_time(durable):
    first = make_cancelled(durable, 0)
    for handle in range(1, MAX_CANCELLED):
        make_cancelled(durable, handle)
    make_cancelled(durable, 0)
    make_cancelled(durable, MAX_CANCELLED)
    with pytest.raises(Cancelled):
        durable.resubmitted(first, "gateway-a")


def test_an_id_that_nobody_has_is_not_remembered(durable):
    assert not durable.cancel("a", "request-1")
    assert durable.resubmitted(make_request(1, tenant="a"), "gateway-a") is None
