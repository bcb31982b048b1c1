"""Who goes first under each policy, and how far fairness goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.policy import TURN, FairPolicy, GroupQueue
from scheduler_svc.core.sequence import SequenceGroup
from tests.support.core_driver import Driver, expected_output, make_config, make_request
from tests.support.tiers import few_examples


def make_driver(policy: PolicyKind, **config) -> Driver:
    return Driver(make_config(**({"policy": policy, "max_num_seqs": 2} | config)), max_in_flight=1)


def order_of_ends(driver: Driver) -> list[int]:
    """Handles in the order in which requests finish."""
    order: list[int] = []
    while driver.plan() is not None or driver.results:
        before = set(driver.finished)
        driver.deliver()
        order += sorted(driver.finished - before)
    return order


def running(driver: Driver) -> set[int]:
    return {group.request.key.handle for group in driver.scheduler.running}


@pytest.mark.parametrize(
    ("policy", "order"), [(PolicyKind.FCFS, [0, 1, 2, 3, 4]), (PolicyKind.PRIORITY, [2, 4, 0, 3, 1])]
)
def test_who_goes_first_and_equals_in_order_of_arrival(policy, order):
    driver = make_driver(policy, max_num_seqs=1)
    for handle, priority in enumerate([0, -5, 7, 0, 7]):
        driver.submit(make_request(handle, max_tokens=2, priority=priority, tenant=str(handle)))
    assert order_of_ends(driver) == order


def test_a_higher_priority_displaces_a_lower_one_that_runs_where_there_is_no_room_beside():
    driver = make_driver(PolicyKind.PRIORITY, max_num_seqs=2)
    low = [make_request(handle, max_tokens=20, priority=-1) for handle in range(2)]
    driver.submit(*low)
    driver.run_steps(1)
    equal, high = make_request(2, max_tokens=20, priority=-1), make_request(3, max_tokens=3, priority=1)
    driver.submit(equal, high)
    driver.plan()
    assert running(driver) == {0, 3}
    driver.finish(*low, equal, high)
    assert driver.usage[1].preemptions == 1
    assert driver.usage[0].preemptions == driver.usage[3].preemptions == 0
    driver.submit(make_request(4, max_tokens=10, priority=-1))
    driver.plan()
    driver.submit(make_request(5, max_tokens=3, priority=9))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions == 1


def test_who_makes_just_enough_room_is_displaced():
    driver = make_driver(PolicyKind.PRIORITY, num_blocks=10, block_size=4, max_num_seqs=4, watermark=0.5)
    stays, leaves = make_request(0, prompt_len=5, priority=5), make_request(1, prompt_len=9, priority=-1)
    driver.submit(stays, leaves)
    driver.run_steps(1)
    # It takes three blocks and leaves five: three more than are free.
    driver.submit(make_request(2, prompt_len=9, priority=1))
    driver.plan()
    assert running(driver) == {0, 2}


def test_a_request_that_can_only_run_alone_displaces_all():
    driver = make_driver(PolicyKind.PRIORITY, num_blocks=6, block_size=4, max_num_seqs=4, watermark=0.5)
    driver.submit(make_request(0, prompt_len=7, max_tokens=12))
    driver.run_steps(1)
    driver.submit(make_request(1, prompt_len=21, max_tokens=2, priority=1))
    driver.plan()
    assert running(driver) == {1}


def test_under_memory_pressure_the_lowest_priority_gives_way():
    driver = make_driver(PolicyKind.PRIORITY, num_blocks=6, block_size=4, max_num_seqs=4)
    important = make_request(1, prompt_len=7, max_tokens=12, priority=3)
    driver.submit(make_request(0, prompt_len=7, max_tokens=12, priority=2))
    driver.submit(important)
    driver.run_until_idle()
    assert driver.usage[0].preemptions > 0
    assert driver.usage[1].preemptions == 0


def test_under_memory_pressure_the_newest_of_the_tenant_that_was_served_most_gives_way():
    driver = make_driver(PolicyKind.FAIR, num_blocks=12, block_size=4, max_num_seqs=4)
    for handle in range(2):
        driver.submit(make_request(handle, prompt_len=7, max_tokens=16, tenant="much"))
    driver.run_steps(2)
    # It is the newest of all, and was served least.
    driver.submit(make_request(2, prompt_len=7, max_tokens=16, tenant="little"))
    driver.run_until_idle()
    assert [driver.usage[handle].preemptions for handle in range(3)] == [0, 1, 0]


def test_a_swapped_group_displaces_a_lower_priority():
    driver = make_driver(PolicyKind.PRIORITY, num_blocks=15, block_size=4, max_num_seqs=8, num_host_blocks=40)
    low = make_request(0, prompt_len=6, max_tokens=20, priority=-1)
    high = make_request(1, prompt_len=34, max_tokens=8, num_sequences=2, priority=5)
    driver.submit(low, high)
    driver.run_steps(7)
    driver.preempt(high)
    assert high.key in driver.scheduler.swapped
    # Both fit, but not what they write next.
    driver.run_steps(1)
    assert running(driver) == {1}
    driver.run_until_idle()
    assert driver.finished == {0, 1}


def test_a_flood_of_one_tenant_does_not_hold_up_another():
    driver = make_driver(PolicyKind.FAIR, max_num_seqs=1)
    for handle in range(12):
        driver.submit(make_request(handle, prompt_len=8, max_tokens=4, tenant="flood"))
    for handle in range(12, 17):
        driver.submit(make_request(handle, prompt_len=8, max_tokens=4, tenant="quiet"))
    order = order_of_ends(driver)
    assert [order.index(handle) for handle in range(12, 17)] == [1, 3, 5, 7, 9]
    assert len(order) == 17


def make_wide_driver(num_steps: int = TURN + 1, **config) -> Driver:
    """One with two requests of tenant "wide", which hold all rows for hundreds of steps and have had so many of them,
    and 4 more that wait."""
    driver = make_driver(PolicyKind.FAIR, **({"max_num_seqs": 8, "num_blocks": 1000, "max_model_len": 1000} | config))
    for handle in range(6):
        driver.submit(make_request(handle, max_tokens=500, num_sequences=4, tenant="wide"))
    driver.run_steps(num_steps)
    assert running(driver) == {0, 1}
    return driver


def test_wide_requests_of_one_tenant_do_not_keep_another_out():
    driver = make_wide_driver(num_host_blocks=1000)
    small = [make_request(handle, max_tokens=20, tenant="small") for handle in (20, 21)]
    driver.submit(*small)
    # It begins with the counter of the other tenant, which is ahead a step later.
    driver.run_steps(2)
    # The newer one made room for both, and the older one keeps its rows.
    assert running(driver) == {0, 20, 21}
    driver.run_steps(20)
    assert driver.finished == {20, 21}
    driver.run_steps(1)
    assert running(driver) == {0, 1}
    for request in small:
        assert driver.outputs[request.key.handle] == expected_output(request)


def test_a_group_is_displaced_once_it_has_had_its_turn_and_not_before():
    driver = make_wide_driver(num_steps=TURN - 2)
    driver.submit(make_request(20, tenant="small"))
    driver.run_steps(2)
    assert running(driver) == {0, 1}
    driver.run_steps(1)
    assert running(driver) == {0, 20}


def test_a_tenant_that_fills_the_pool_does_not_keep_another_out():
    driver = make_driver(PolicyKind.FAIR, num_blocks=40, max_model_len=150, max_num_seqs=4)
    for handle in range(2):
        driver.submit(make_request(handle, prompt_len=30, max_tokens=45, tenant="long"))
    driver.run_steps(TURN + 5)
    assert running(driver) == {0, 1}
    small = make_request(2, prompt_len=28, max_tokens=8, tenant="small")
    driver.submit(small)
    driver.run_steps(2)
    assert running(driver) == {0, 2}
    driver.finish(small)


def test_a_displaced_request_has_its_turn_before_a_small_one_displaces_it_again():
    driver = make_wide_driver(num_host_blocks=1000)
    handle, num_steps = 20, 4 * TURN
    for _ in range(num_steps):
        if not any(group.request.tenant == "small" for group in driver.scheduler.groups()):
            handle += 1
            driver.submit(make_request(handle, max_tokens=4, tenant="small"))
        driver.run_steps(1)
    # A small one waits for a turn at most, and takes some steps itself.
    assert handle - 20 > num_steps // (TURN + 10)
    wide = [group for group in driver.scheduler.groups() if group.preemptions]
    assert wide
    for group in wide:
        assert group.request.tenant == "wide"
        assert group.preemptions <= group.sequences[0].num_output_tokens // TURN


def test_tenants_that_hold_alike_do_not_displace_each_other():
    driver = make_driver(PolicyKind.FAIR, max_num_seqs=8, num_blocks=1000, max_model_len=1000)
    for handle in range(10):
        driver.submit(make_request(handle, max_tokens=TURN + 9, tenant=f"tenant-{handle}"))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions == 0


def test_who_asks_for_little_at_a_time_gets_more_turns():
    driver = make_driver(PolicyKind.FAIR, max_num_seqs=1, max_num_batched_tokens=64)
    for handle in range(4):
        driver.submit(make_request(handle, prompt_len=40, max_tokens=20, tenant="long"))
    for handle in range(4, 12):
        driver.submit(make_request(handle, prompt_len=4, max_tokens=4, tenant="short"))
    order = order_of_ends(driver)
    # One long turn costs 40 + 2 * 20, a short one 4 + 2 * 4: the next long one comes after seven short ones.
    assert order[:9] == [0, 4, 5, 6, 7, 8, 9, 10, 1]


def test_idle_time_is_not_saved_up():
    driver = make_driver(PolicyKind.FAIR, max_num_seqs=1)
    driver.submit(make_request(0, max_tokens=2, tenant="idle"))
    driver.run_until_idle()
    for handle in range(1, 30):
        driver.submit(make_request(handle, max_tokens=4, tenant="busy"))
    driver.run_steps(60)
    for handle in range(30, 40):
        driver.submit(make_request(handle, max_tokens=4, tenant="idle"))
    served_before = len(driver.finished)
    order = order_of_ends(driver)
    assert served_before > 5
    # They take turns from now on; the idle tenant does not get ten in a row.
    assert sum(handle >= 30 for handle in order[:10]) in (4, 5, 6)


def test_tenants_that_are_gone_are_forgotten_and_one_that_waits_is_not():
    policy = FairPolicy()
    waiting = GroupQueue(policy.new_first)
    for number in range(1000):
        request = make_request(number, tenant=f"tenant-{number}")
        policy.arriving(request.tenant, waiting)
        waiting.add(SequenceGroup.of(request, number, 4, 0.0))
        if number:
            waiting.remove(request.key)
    assert len(policy.counters) < 200
    assert "tenant-0" in policy.counters


def test_who_comes_starts_no_higher_than_one_all_of_whose_requests_are_held():
    policy = FairPolicy()
    waiting = GroupQueue(policy.new_first)
    policy.counters["much"] = 100
    for number, tenant in enumerate(("held", "much", "new")):
        request = make_request(number, tenant=tenant)
        policy.arriving(tenant, waiting)
        waiting.add(SequenceGroup.of(request, number, 4, 0.0))
        if tenant == "held":
            waiting.hold(request.key)
    assert policy.counters == {"held": 0, "much": 100, "new": 0}


@few_examples()
@given(data=st.data(), num_blocks=st.sampled_from([100, 24, 14]), preemption_mode=st.sampled_from(PreemptionMode))
def test_the_tenant_that_was_served_least_is_next_whatever_comes_and_goes(data, num_blocks, preemption_mode):
    driver = make_driver(
        PolicyKind.FAIR,
        max_num_seqs=3,
        num_blocks=num_blocks,
        num_host_blocks=30,
        preemption_mode=preemption_mode,
        max_num_batched_tokens=16,
        max_model_len=48,
    )
    scheduler = driver.scheduler
    policy = scheduler.policy
    assert isinstance(policy, FairPolicy)
    queues = (scheduler.waiting, scheduler.swapped)
    for handle in range(25):
        tenant = data.draw(st.sampled_from("abcde"), label="tenant")
        # Long prompts of one tenant are alike, so that some are held until another has computed them.
        prompt = [ord(tenant)] * data.draw(st.sampled_from([1, 9, 40]), label="prompt")
        driver.submit(make_request(handle, prompt=prompt, max_tokens=4, tenant=tenant))
        if data.draw(st.booleans(), label="step"):
            driver.run_steps(1)
        firsts = [queue.first_of(tenant) for queue in queues for tenant in queue.tenants_with_next()]
        if firsts:
            expected = min(firsts, key=lambda group: (policy.counters[group.request.tenant], group.order))
            assert policy.next_of(*queues) is expected
    driver.run_until_idle()
