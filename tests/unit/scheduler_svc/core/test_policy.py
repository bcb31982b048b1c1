"""The order of requests under each policy, and the limits of fairness."""

import pytest

from scheduler_svc.core.config import PolicyKind
from scheduler_svc.core.policy import TURN, FairPolicy, GroupQueue
from scheduler_svc.core.sequence import SequenceGroup
from tests.support.core_driver import Driver, make_config, make_request


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


def test_who_makes_just_enough_room_is_displaced():
    driver = make_driver(PolicyKind.PRIORITY, num_blocks=10, block_size=4, max_num_seqs=4, watermark=0.5)
    stays, leaves = make_request(0, prompt_len=5, priority=5), make_request(1, prompt_len=9, priority=-1)
    driver.submit(stays, leaves)
    driver.run_steps(1)
    # It takes three blocks and must leave five free: three more than are free now.
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
    # It is the newest request, and was served least.
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
    # Both requests fit, but their next tokens do not.
    driver.run_steps(1)
    assert running(driver) == {1}
    driver.run_until_idle()
    assert driver.finished == {0, 1}


def make_wide_driver(num_steps: int = TURN + 1, **config) -> Driver:
    """A driver in which two requests of tenant "wide" hold all rows for hundreds of steps, have had `num_steps` of
    them, and 4 more wait."""
    driver = make_driver(PolicyKind.FAIR, **({"max_num_seqs": 8, "num_blocks": 1000, "max_model_len": 1000} | config))
    for handle in range(6):
        driver.submit(make_request(handle, max_tokens=500, num_sequences=4, tenant="wide"))
    driver.run_steps(num_steps)
    assert running(driver) == {0, 1}
    return driver


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


def test_what_tenants_got_counts_in_another_pool():
    driver = make_driver(PolicyKind.FAIR, max_num_seqs=1, max_model_len=400, num_blocks=200)
    driver.submit(make_request(0, max_tokens=300, tenant="wide"))
    driver.run_steps(TURN // 2)
    driver.submit(make_request(1, max_tokens=300, tenant="wide"))
    driver.submit(make_request(2, max_tokens=8, tenant="small"))
    driver.run_steps(4)
    assert running(driver) == {0}
    driver.crash(config=make_config(policy=PolicyKind.FAIR, max_num_seqs=1, max_model_len=400, num_blocks=201))
    driver.run_steps(1)
    assert running(driver) == {2}


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
    assert [waiting.is_held(make_request(number).key) for number in range(4)] == [True, False, False, False]
    assert policy.counters == {"held": 0, "much": 100, "new": 0}


def test_who_comes_starts_no_higher_than_one_that_left_the_batch_below_the_tenant_that_was_served_alone():
    policy = FairPolicy()
    waiting = GroupQueue(policy.new_first)
    policy.counters.update(little=10, much=100)
    alone, preempted = make_request(0, tenant="much"), make_request(1, tenant="little")
    policy.arriving("much", waiting)
    waiting.add(SequenceGroup.of(alone, 0, 4, 0.0))
    waiting.remove(policy.next_of(waiting).request.key)
    policy.arriving("much", waiting)
    waiting.add(SequenceGroup.of(preempted, 1, 4, 0.0))
    policy.arriving("new", waiting)
    assert policy.counters == {"little": 10, "much": 100, "new": 10}
