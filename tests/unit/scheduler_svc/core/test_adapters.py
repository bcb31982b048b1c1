"""Slots of adapters: a request waits until its adapter is loaded, a slot in use is never overwritten, no adapter waits
forever, and results of different adapters are not mixed."""

from dataclasses import replace

from quire.messages.prefix_hashes import root_hash
from scheduler_svc.core import preparation
from scheduler_svc.core.admission import Obstacle
from scheduler_svc.core.request import Adapter, Request
from scheduler_svc.core.view import waiting
from tests.support.core_driver import CLIENT, Driver, expected_output, make_config, make_request

A, B, C = b"\x01", b"\x02", b"\x03"


def make_driver(max_adapters: int = 1, **changes) -> Driver:
    return Driver(make_config(max_adapters=max_adapters, **changes))


def loaded(driver: Driver) -> set[bytes]:
    return {adapter.digest for adapter in driver.scheduler.batch.adapters.num_rows()}


def told(driver: Driver) -> list[tuple[bytes, int | None]]:
    """The adapters that the workers must load now, and their slots."""
    return [(each.need.digest, each.slot) for each in driver.tell() if isinstance(each.need, Adapter)]


def with_adapter(handle: int, adapter: bytes, **fields) -> Request:
    return make_request(handle, adapter=adapter, **fields)


def test_a_request_waits_for_its_adapter_and_others_pass() -> None:
    driver = make_driver()
    first, other = with_adapter(1, A), make_request(2)
    driver.submit(first, other)
    driver.run_what_can()
    assert driver.finished == {2}
    (why,) = waiting(driver.scheduler, 8)
    assert why.obstacle is Obstacle.ADAPTER
    driver.finish(first, other)
    assert driver.outputs[1] != expected_output(replace(first, adapter=None))


def test_the_one_whose_last_row_ended_first_makes_room_and_arrivals_alone_evict_none() -> None:
    driver = make_driver(2)
    for handle, adapter in ((1, A), (2, B), (3, A)):
        driver.submit(with_adapter(handle, adapter))
        driver.run_until_idle()
    assert loaded(driver) == {A, B}
    driver.submit(with_adapter(4, C))
    # The request has arrived, but is not next yet.
    assert not told(driver)
    assert driver.plan() is None
    assert told(driver) == [(C, 1)]
    assert loaded(driver) == {A}
    driver.run_until_idle()
    assert loaded(driver) == {A, C}


def test_a_slot_with_rows_is_drained_and_who_waits_is_next() -> None:
    driver = make_driver()
    driver.submit(with_adapter(1, A, max_tokens=10))
    told(driver)
    driver.compile_next()
    driver.run_steps(2)
    driver.submit(with_adapter(2, B))
    driver.run_steps(1)
    assert not told(driver)
    # A takes no further request, though it is loaded.
    driver.submit(with_adapter(3, A))
    driver.run_steps(2)
    assert [group.request.key.handle for group in driver.scheduler.running] == [1]
    driver.run_what_can()
    assert driver.finished == {1}
    assert told(driver) == [(B, 0)]
    driver.compile_next()
    driver.run_what_can()
    assert driver.finished == {1, 2}
    driver.run_until_idle()
    assert driver.finished == {1, 2, 3}


def test_an_adapter_in_constant_use_keeps_no_other_out() -> None:
    driver = make_driver()
    driver.submit(with_adapter(1, A), with_adapter(2, A), with_adapter(1000, B))
    for handle in range(3, 40):
        driver.submit(with_adapter(handle, A))
        driver.run_steps(2)
        driver.tell()
        driver.compile_next()
        if 1000 in driver.finished:
            break
    assert 1000 in driver.finished
    driver.run_until_idle()
    assert driver.finished == driver.outputs.keys()


def test_what_was_loaded_for_a_request_is_there_when_it_enters() -> None:
    driver = make_driver()
    driver.submit(with_adapter(1, A), with_adapter(2, B))
    driver.plan()
    assert told(driver) == [(A, 0)]
    driver.compile_next()
    # No step was planned since: B must not take the slot before request 1 has used it.
    assert not told(driver)
    driver.run_what_can()
    assert driver.finished == {1}
    # An aborted request no longer holds the slot.
    driver.submit(with_adapter(3, C))
    driver.plan()
    assert told(driver) == [(B, 0)]
    driver.scheduler.abort(with_adapter(2, B).key)
    driver.compile_next()
    driver.plan()
    assert told(driver) == [(C, 0)]


def test_a_failed_load_fails_those_that_wait_and_no_other() -> None:
    driver = make_driver()
    driver.unloadable.add(A)
    driver.submit(with_adapter(1, A), with_adapter(2, B), with_adapter(3, A))
    driver.plan()
    driver.tell()
    (load,) = driver.told
    driver.told.clear()
    events = driver.scheduler.prepared(load.number, "its files are gone")
    failures = events[CLIENT].failed
    assert [failure.key.handle for failure in failures] == [1, 3]
    assert {failure.reason for failure in failures} == {"ADAPTER_NOT_LOADED"}
    assert failures[0].message == "the adapter of this request cannot be loaded: its files are gone"
    driver.unloadable.clear()
    driver.run_until_idle()
    assert driver.finished == {2}
    again = with_adapter(4, A)
    driver.submit(again)
    driver.finish(again)


def test_a_load_that_takes_too_long_fails_those_that_wait_and_no_other() -> None:
    driver = make_driver()
    driver.submit(with_adapter(1, A), make_request(2))
    driver.plan()
    driver.tell()
    events = driver.scheduler.end_late_preparation(driver.told.popleft().number, 5.0)
    (failure,) = events[CLIENT].failed
    assert (failure.key.handle, failure.reason) == (1, "ADAPTER_TIMEOUT")
    assert failure.message == "the workers have not loaded the adapter of this request for 5.0 s"
    driver.run_what_can()
    assert driver.finished == {2}


def test_what_adapters_computed_is_shared_within_a_tenant_and_an_adapter() -> None:
    driver = make_driver(2)
    prompt = [7] * 17
    usages = []
    for handle, adapter in enumerate([b"", A, B, A, b""], 1):
        driver.submit(make_request(handle, prompt=prompt, adapter=adapter))
        driver.run_until_idle()
        usages.append(driver.usage[handle].cached_tokens)
    assert usages == [0, 0, 0, 16, 16]
    assert len({root_hash("a"), root_hash("a", A), root_hash("a", B), root_hash("b", A)}) == 4


def test_groups_with_more_constraints_than_workers_keep_come_to_their_adapters(monkeypatch) -> None:
    monkeypatch.setattr(preparation, "NUM_KEPT", 1)
    driver = Driver(make_config(max_adapters=1, prepares_constraints=True))
    for handle, (digest, tenant) in enumerate(((A, "c"), (B, "a"), (C, "c")), start=1):
        driver.submit(with_adapter(handle, digest, constraint=digest, tenant=tenant))
    driver.run_until_idle(1000)
    assert driver.finished == {1, 2, 3}
