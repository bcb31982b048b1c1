"""The queue's bounds among tenants: a tenant that comes first does not keep the others out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.request import QueueFullError
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core_driver import make_config, make_request


def make_scheduler(**changes) -> Scheduler:
    """A scheduler that admits no request, since it never plans a step."""
    return Scheduler(make_config(**({"max_waiting_requests": 8, "max_waiting_tokens": 1000} | changes)))


def fill(scheduler: Scheduler, tenant: str, prompt_len: int = 5) -> int:
    """Submits until the tenant is refused; returns the number of accepted requests."""
    first = 1000 * (1 + max((group.request.key.handle // 1000 for group in scheduler.groups()), default=-1))
    for count in range(1000):
        try:
            scheduler.submit(make_request(first + count, tenant=tenant, prompt_len=prompt_len), 0.0)
        except QueueFullError:
            return count
    raise AssertionError("nothing bounds the queue")


def test_who_comes_to_a_queue_that_another_filled_has_an_equal_share():
    scheduler = make_scheduler()
    assert fill(scheduler, "a") == 8
    assert fill(scheduler, "b") == 4
    assert fill(scheduler, "c") == 2
    for tenant, own, share in (("a", 9, 2), ("b", 5, 2), ("c", 3, 2)):
        words = f"^{own} requests would be waiting of this tenant; .* 8 is taken, .* 3 tenants .* each has {share}$"
        with pytest.raises(QueueFullError, match=words):
            scheduler.submit(make_request(99, tenant=tenant), 0.0)


def test_tokens_are_shared_as_requests_are():
    scheduler = make_scheduler(max_waiting_requests=100, max_waiting_tokens=100)
    assert fill(scheduler, "a", prompt_len=20) == 5
    assert fill(scheduler, "b", prompt_len=20) == 2
    # An empty share takes one request of any size.
    assert fill(scheduler, "c", prompt_len=60) == 1
    with pytest.raises(QueueFullError, match=r"60 tokens would be waiting of this tenant; .* each has 33"):
        scheduler.submit(make_request(99, tenant="b", prompt_len=20), 0.0)


def test_many_tenants_take_no_more_than_the_overflow():
    for tenant_overflow, most in ((0.0, 8), (0.5, 12), (1.0, 16)):
        scheduler = make_scheduler(tenant_overflow=tenant_overflow)
        fill(scheduler, "a")
        taken = sum(fill(scheduler, f"tenant {number}") for number in range(30))
        assert 8 + taken == scheduler.num_live == most
        with pytest.raises(QueueFullError, match="would be waiting; there is room for 8"):
            scheduler.submit(make_request(99, tenant="late"), 0.0)


def test_a_tenant_that_waits_behind_its_share_gets_in_again_as_its_requests_leave():
    scheduler = make_scheduler()
    fill(scheduler, "a")
    fill(scheduler, "b")
    for handle in range(6):
        assert scheduler.abort(make_request(handle, tenant="a").key)
    assert fill(scheduler, "a") == 2
    assert (scheduler.waiting.num_of("a"), scheduler.waiting.num_of("b")) == (4, 4)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30), st.booleans()), max_size=60))
def test_tokens_of_each_tenant_are_counted_as_they_come_and_go(moves):
    scheduler = make_scheduler(max_waiting_requests=1000)
    live = []
    for handle, (tenant, prompt_len, leaves) in enumerate(moves):
        request = make_request(handle, tenant=tenant, prompt_len=prompt_len)
        scheduler.submit(request, 0.0)
        live.append(request)
        if leaves:
            scheduler.abort(live.pop(0).key)
        for each in "abcd":
            own = [request for request in live if request.tenant == each]
            assert scheduler.waiting.num_of(each) == len(own)
            assert scheduler.waiting.num_tokens_of(each) == sum(len(request.prompt) for request in own)
