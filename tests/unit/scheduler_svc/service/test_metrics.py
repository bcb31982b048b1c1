"""The scheduler's counters of requests, of the prefix cache and of tenants."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from quire.service.histograms import OTHER_TENANTS
from scheduler_svc.core.request import Handle
from scheduler_svc.core.step import ClientEvents, RequestEnd, Usage
from scheduler_svc.service.kept_requests import DurableLimits, DurableRoom
from scheduler_svc.service.metrics import SchedulerMetrics, Served
from scheduler_svc.service.requests import GATEWAYS, Requests
from tests.support.core_driver import Driver, make_config, make_request

PROMPT = list(range(8))


@pytest.fixture
def driver(request) -> Driver:
    return Driver(make_config(**getattr(request, "param", {})))


@pytest.fixture
def metrics(driver) -> SchedulerMetrics:
    metrics = SchedulerMetrics(max_tenants=1)
    requests = create_autospec(Requests, instance=True)
    requests.durable = DurableRoom(DurableLimits(0, 0, 0.0))
    requests.get = lambda handle: SimpleNamespace(tenant="abc"[handle - 1])
    metrics.watch(lambda: driver.scheduler, requests, lambda: 1000)
    return metrics


def value_of(metrics: SchedulerMetrics, name: str, **labels: str) -> Any:
    return metrics.registry.get_sample_value(f"quire_scheduler_{name}", labels)


def run(driver: Driver, metrics: SchedulerMetrics) -> None:
    """Runs all requests to their ends, and counts like the step loop."""
    for _ in range(200):
        while (plan := driver.plan()) is not None:
            metrics.planned(plan, 0.001)
        for client, events in driver.deliver().items():
            assert client == GATEWAYS
            metrics.delivered(events)
        if not driver.scheduler.num_live:
            return
    pytest.fail("the requests did not end")


def test_a_request_counts_once_with_its_phases_and_what_of_its_prompt_was_cached(driver, metrics):
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt=[*PROMPT, handle], max_tokens=3))
        run(driver, metrics)
    assert [value_of(metrics, f"{phase}_seconds_count") for phase in ("queue", "prefill", "decode")] == [2, 2, 2]
    assert value_of(metrics, "prefix_cache_queries_total") == 18
    assert value_of(metrics, "prefix_cache_hits_total") == 8
    steps = value_of(metrics, "steps_total")
    assert value_of(metrics, "step_tokens_count") == value_of(metrics, "step_sequences_count") == steps
    assert value_of(metrics, "step_tokens_sum") == value_of(metrics, "batched_tokens_total")


def test_times_to_the_first_token_are_of_the_last_minute():
    now = 0.0
    served = Served(lambda: now)
    assert served.first_token_ms() is None
    for queue_s in range(100):
        usage = Usage(8, 0, 3, preemptions=0, queue_s=float(queue_s), prefill_s=0.5, decode_s=1.0)
        served.add(ClientEvents(completed=[RequestEnd(Handle(1), usage)]))
    assert served.first_token_ms() == (50_500, 95_500)
    now = 61.0
    assert served.first_token_ms() is None


def test_an_aborted_request_counts_in_the_phases_that_it_reached(driver, metrics):
    waits, runs = make_request(1, prompt=PROMPT), make_request(2, prompt=PROMPT, max_tokens=50)
    driver.submit(runs)
    driver.run_steps(3)
    driver.submit(waits)
    for request in (runs, waits):
        group = driver.scheduler.group(request.key)
        assert group is not None
        metrics.aborted(group, group.timeline.arrived + 100)
    assert [value_of(metrics, f"{phase}_seconds_count") for phase in ("queue", "prefill", "decode")] == [1, 1, 1]
    assert value_of(metrics, "requests_total", outcome="aborted") == 2


def test_the_age_of_the_oldest_request_is_that_of_one_that_no_step_had(driver, metrics):
    assert value_of(metrics, "oldest_waiting_seconds") == 0
    driver.submit(make_request(1, prompt=PROMPT))
    assert value_of(metrics, "oldest_waiting_seconds") > 0
    assert value_of(metrics, "kv_cache_usage") == 0
    driver.run_steps(1)
    assert value_of(metrics, "oldest_waiting_seconds") == 0
    assert value_of(metrics, "kv_cache_usage") == pytest.approx(2 / 64, abs=1 / 64)


def test_tenants_have_metrics_up_to_a_number_and_the_others_share_theirs(driver, metrics):
    for handle, tenant in enumerate("abc", start=1):
        driver.submit(make_request(handle, prompt=PROMPT, max_tokens=3, tenant=tenant))
    first = value_of(metrics, "tenant_live_requests", tenant="a", queue="waiting")
    assert [first, value_of(metrics, "tenant_live_requests", tenant=OTHER_TENANTS, queue="waiting")] == [1, 2]
    driver.run_steps(1)
    assert value_of(metrics, "tenant_blocks", tenant="a") >= 2
    run(driver, metrics)
    assert value_of(metrics, "tenant_queue_seconds_count", tenant="a") == 1
    assert value_of(metrics, "tenant_prefix_cache_queries_total", tenant=OTHER_TENANTS) == 16
    assert value_of(metrics, "tenant_live_requests", tenant="a", queue="waiting") is None


def test_memory_is_told_in_bytes(driver, metrics):
    driver.submit(make_request(1, prompt=PROMPT, max_tokens=8))
    driver.run_steps(2)
    for state in ("free", "cached", "used", "pinned"):
        blocks = value_of(metrics, "gpu_blocks", state=state)
        assert value_of(metrics, "gpu_bytes", state=state) == 1000 * blocks
    in_tables = [value_of(metrics, "running_bytes", layers=kind) for kind in ("full", "windowed", "states")]
    assert in_tables == [1000 * value_of(metrics, "gpu_blocks", state="used"), 0, 0]


@pytest.mark.parametrize("driver", [{"state_blocks": 3}], indirect=True)
def test_blocks_of_states_are_told_by_kind_and_count_for_their_tenants(driver, metrics):
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt=[*PROMPT, handle], max_tokens=20, tenant="a"))
    driver.run_steps(3)
    full, windowed, states = (
        value_of(metrics, "running_bytes", layers=kind) / 1000 for kind in ("full", "windowed", "states")
    )
    running = [each for group in driver.scheduler.running for each in group.unfinished]
    assert full == sum(len(each.block_table) for each in running)
    assert [windowed, states] == [0, 6]
    assert value_of(metrics, "tenant_blocks", tenant="a") == full + states


@pytest.mark.parametrize("driver", [{"windowed_groups": 2, "window": 6}], indirect=True)
def test_blocks_of_windows_are_told_by_kind_and_blanks_are_no_blocks(driver, metrics):
    driver.submit(make_request(1, prompt_len=30, max_tokens=50, tenant="a"))
    driver.run_steps(12)
    (sequence,) = driver.scheduler.running.first().unfinished
    held = [block for block in sequence.block_table if block not in driver.scheduler.batch.blocks.blank]
    full, windowed = (value_of(metrics, "running_bytes", layers=kind) / 1000 for kind in ("full", "windowed"))
    assert 3 * full == len(sequence.block_table) > full + windowed
    assert full + windowed == len(held) == value_of(metrics, "tenant_blocks", tenant="a")
