"""Groups with a constraint wait until the workers have compiled it, and no other group waits with them."""

import pytest

from scheduler_svc.core import preparation
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.fault_isolation import LOSSES_BEFORE_TRIALS, LOSSES_ON_TRIAL
from scheduler_svc.core.prefix_index import PrefixHashes
from scheduler_svc.core.preparation import NUM_KEPT, Preparation
from scheduler_svc.core.request import Adapter, Constraint, Need, Request
from tests.support.core_driver import Driver, expected_output, make_config, make_request


def make_driver(**changes) -> Driver:
    return Driver(make_config(prepares_constraints=True, **changes))


def constrained(handle: int, parameters: bytes = b"a", **fields) -> Request:
    return make_request(handle, constraint=parameters, **fields)


def parameters_of(told: Preparation) -> bytes:
    assert isinstance(told.need, Constraint)
    return told.need.parameters


def prepare(driver: Driver) -> list[bytes]:
    """The workers compile all constraints that they get; returns them in this order."""
    compiled = []
    while driver.told or driver.tell():
        compiled.append(parameters_of(driver.told[0]))
        driver.compile_next()
    return compiled


def test_what_was_compiled_is_kept_until_a_constraint_fails_where_a_row_samples() -> None:
    driver = make_driver()
    driver.submit(constrained(1))
    assert prepare(driver) == [b"a"]
    driver.run_what_can()
    driver.refusing[2] = 6
    driver.submit(constrained(2))
    assert not driver.tell()
    driver.run_what_can()
    assert driver.failed == {2}
    driver.submit(constrained(3))
    assert prepare(driver) == [b"a"]


def test_few_are_underway_at_once_and_tenants_take_turns() -> None:
    driver = make_driver()
    for handle in range(4):
        driver.submit(constrained(handle, b"flood %d" % handle, tenant="many"))
    first = driver.tell()
    assert [parameters_of(each) for each in first] == [b"flood 0", b"flood 1"]
    driver.submit(constrained(9, b"one", tenant="few"))
    assert not driver.tell()
    driver.compile_next()
    driver.compile_next()
    assert [parameters_of(each) for each in driver.tell()] == [b"flood 2", b"one"]


def test_a_tenant_for_which_nothing_can_begin_keeps_its_turn_while_an_adapter_of_another_one_does() -> None:
    driver = make_driver(max_adapters=1)
    for handle in range(4):
        driver.submit(constrained(handle, b"flood %d" % handle, tenant="many"))
    driver.tell()
    driver.submit(constrained(8, b"one", tenant="few"))
    driver.submit(make_request(9, adapter=b"a", tenant="other"))
    driver.compile_next()
    flood, load = driver.tell()
    assert (parameters_of(flood), load.need) == (b"flood 2", Adapter(b"a"))
    driver.compile_next()
    assert [parameters_of(each) for each in driver.tell()] == [b"one"]


def test_what_only_requests_that_are_over_wanted_is_not_prepared() -> None:
    driver = make_driver()
    for handle in range(1, 6):
        driver.submit(constrained(handle, b"%d" % min(handle, 4)))
        if handle < 5:
            driver.scheduler.abort(make_request(handle).key)
    assert prepare(driver) == [b"4"]
    driver.run_what_can()
    assert not driver.failed


def test_an_answer_that_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="preparation 7 was answered"):
        make_driver().scheduler.prepared(7)


def test_a_constraint_that_is_never_compiled_fails_the_requests_that_wait_for_it_and_no_other() -> None:
    driver = make_driver()
    stuck, other, behind = constrained(1), constrained(2, b"b"), constrained(3, b"c")
    for request in (stuck, other, behind, make_request(4)):
        driver.submit(request)
    (first, _) = driver.tell()
    driver.run_steps(1)
    events = driver.scheduler.end_late_preparation(first.number, 5.0)
    driver.told.popleft()
    (failure,) = events[stuck.key.client].failed
    assert (failure.key, failure.reason) == (stuck.key, "CONSTRAINT_TIMEOUT")
    assert failure.message == "the workers have not compiled the constraint of this request for 5.0 s"
    assert prepare(driver) == [b"b", b"c"]
    driver.run_what_can()
    assert driver.finished == {2, 3, 4}
    assert driver.outputs[2] == expected_output(other)
    # Its answer comes after all, for later requests with the same constraint.
    driver.submit(constrained(5))
    (again,) = driver.tell()
    driver.scheduler.prepared(first.number)
    driver.compiled[b"a"] = None
    driver.submit(constrained(6))
    assert not driver.tell()
    driver.run_what_can()
    assert driver.finished >= {5, 6}
    driver.scheduler.prepared(again.number)


def test_a_constraint_that_is_compiled_late_is_the_newest_that_workers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "NUM_KEPT", 2)
    driver = make_driver()
    driver.submit(constrained(1, b"late"))
    driver.tell()
    late = driver.told.popleft()
    driver.scheduler.end_late_preparation(late.number, 5.0)
    for handle, parameters in enumerate((b"late", b"other"), 2):
        driver.submit(constrained(handle, parameters))
        assert prepare(driver) == [parameters]
    driver.scheduler.prepared(late.number)
    # One more constraint replaces the oldest.
    driver.submit(constrained(4, b"newest"), constrained(5, b"late"))
    assert prepare(driver) == [b"newest"]
    driver.submit(constrained(6, b"other"))
    assert prepare(driver) == [b"other"]


@pytest.mark.parametrize("mode", [PreemptionMode.RECOMPUTE, PreemptionMode.SWAP])
def test_a_preempted_group_is_prepared_again_where_workers_may_have_forgotten(mode: PreemptionMode) -> None:
    driver = make_driver(preemption_mode=mode, num_host_blocks=16)
    request = constrained(1, max_tokens=20)
    driver.submit(request)
    prepare(driver)
    driver.run_steps(3)
    for handle in range(100, 100 + NUM_KEPT):
        driver.submit(constrained(handle, b"%d" % handle, max_tokens=1))
        assert prepare(driver) == [b"%d" % handle]
        driver.scheduler.abort(constrained(handle).key)
    driver.preempt(request)
    driver.run_what_can()
    assert not driver.finished
    assert prepare(driver) == [b"a"]
    driver.run_what_can()
    assert driver.outputs[1] == expected_output(request)


DEADLY_ADAPTER = Adapter(b"d")
NUM_DEATHS = LOSSES_BEFORE_TRIALS + LOSSES_ON_TRIAL


@pytest.mark.parametrize("need", [Constraint(b"deadly"), DEADLY_ADAPTER], ids=["constraint", "adapter"])
@pytest.mark.parametrize("num_others", [0, 3])
def test_a_preparation_that_the_worker_dies_of_fails_those_that_wait_for_it(need: Need, num_others: int) -> None:
    driver = make_driver(max_adapters=1)
    driver.deadly_needs.add(need)
    waiting = [needing(handle, need) for handle in (1, 2)]
    others = [make_request(10 + number, max_tokens=100) for number in range(num_others)]
    driver.submit(*others, *waiting)
    driver.finish(*others)
    assert driver.failed == {1, 2}
    assert driver.num_deaths == NUM_DEATHS
    # The last ones came while no other work was done.
    assert driver.deaths[-LOSSES_ON_TRIAL:] == [(0, [need])] * LOSSES_ON_TRIAL

    driver.submit(needing(3, need))
    driver.run_until_idle()
    assert driver.failed == {1, 2, 3}
    assert driver.num_deaths == NUM_DEATHS + 1


def test_a_preparation_that_succeeds_clears_what_was_counted_against_it() -> None:
    driver = make_driver()
    for handle in range(4):
        driver.deadly_needs.add(Constraint(b"a"))
        driver.submit(constrained(handle))
        for _ in range(NUM_DEATHS - 1):
            driver.plan()
            driver.tell()
            assert driver.compile_next()
        driver.deadly_needs.clear()
        driver.run_until_idle()
        # The compiled constraint is gone.
        driver.crash()
    assert driver.finished == {0, 1, 2, 3}
    assert driver.num_deaths == 4 * (NUM_DEATHS - 1)


def test_what_is_prepared_beside_a_suspect_is_not_at_fault() -> None:
    driver = make_driver(max_adapters=2)
    driver.deadly_needs.add(DEADLY_ADAPTER)
    others = [constrained(handle, bytes([handle]), tenant=str(handle)) for handle in range(1, 5)]
    others.append(needing(5, Adapter(b"g")))
    driver.submit(needing(6, DEADLY_ADAPTER), *others)
    driver.finish(*others)
    assert driver.failed == {6}
    assert driver.num_deaths <= NUM_DEATHS + 1


def test_a_suspect_adapter_waits_for_a_slot_while_others_run_and_are_prepared() -> None:
    """Steps continue if it does not wait for the steps in flight."""
    driver = make_driver(max_adapters=1)
    driver.deadly_needs.add(DEADLY_ADAPTER)
    driver.submit(needing(1, DEADLY_ADAPTER))
    while driver.num_deaths < LOSSES_BEFORE_TRIALS:
        driver.plan()
        driver.tell()
        driver.compile_next()
    other = make_request(2, adapter=b"g", max_tokens=30)
    driver.scheduler.abort(driver.scheduler.waiting.first().request.key)
    driver.submit(other)
    driver.plan()
    driver.tell()
    driver.compile_next()
    driver.run_steps(3)
    driver.submit(needing(3, DEADLY_ADAPTER))
    driver.run_steps(1)
    driver.submit(beside := constrained(4, tenant="other"))
    for _ in range(12):
        driver.plan()
        driver.tell()
        driver.compile_next()
        driver.deliver()
    assert 4 in driver.finished
    assert 2 not in driver.finished
    driver.finish(other, beside)
    assert driver.failed == {3}
    assert driver.num_deaths == NUM_DEATHS


def test_a_suspect_has_its_turn_beside_a_stream_of_prompts_whose_blocks_are_on_disk() -> None:
    driver = make_driver()
    driver.deadly_needs.add(Constraint(b"a"))
    driver.submit(constrained(1))
    while driver.num_deaths < LOSSES_BEFORE_TRIALS:
        driver.plan()
        driver.tell()
        driver.compile_next()
    prompts = [make_request(handle, prompt=[handle % 50] * 9, max_tokens=1) for handle in range(10, 60)]
    hashes = [name for each in prompts for name in PrefixHashes(each.cache_root, 4).first(2, list(each.prompt))]
    driver.scheduler.tier_changed(range(len(hashes)), hashes)
    for prompt in prompts:
        # Earlier needs are answered when the next blocks are on their way.
        num_told = len(driver.told)
        driver.submit(prompt)
        driver.plan()
        driver.tell()
        for _ in range(num_told):
            driver.compile_next()
        driver.deliver()
    assert driver.num_deaths > LOSSES_BEFORE_TRIALS


def needing(handle: int, need: Need) -> Request:
    if isinstance(need, Constraint):
        return constrained(handle, need.parameters)
    assert isinstance(need, Adapter)
    return make_request(handle, adapter=need.digest)
