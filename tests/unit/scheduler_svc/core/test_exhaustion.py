"""Exhausted resources: nothing deadlocks, nothing is lost, and refusals say what to do. Preemption by swap (the paper's
section 4.5) moves all of a group or nothing, moves shared blocks once, and brings the group back before others."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.request import Request, max_blocks
from tests.support.core_driver import Driver, continued, make_config, make_request


def test_admission_stops_at_the_watermark_and_a_lone_group_does_not():
    driver = Driver(make_config(num_blocks=20, block_size=4, watermark=0.25), max_in_flight=1)
    driver.submit(make_request(0, prompt_len=30, max_tokens=2))
    driver.submit(make_request(1, prompt_len=28, max_tokens=2))
    driver.plan()
    # 8 of 20 blocks are taken and 5 must stay free: 7 more fit.
    assert len(driver.scheduler.running) == 2
    driver.submit(make_request(2, prompt_len=3, max_tokens=2))
    driver.plan()
    assert len(driver.scheduler.waiting) == 1
    driver.run_until_idle()
    lone = make_request(3, prompt_len=70, max_tokens=10)
    driver.submit(lone)
    driver.finish(lone)


@st.composite
def any_requests(draw: st.DrawFn) -> Request:
    """A random request of any kind."""
    prompt_len, max_tokens, count = draw(st.integers(1, 40)), draw(st.integers(1, 12)), draw(st.integers(1, 5))
    beam = draw(st.sampled_from([None, None, BeamParameters(count)]))
    request = make_request(
        1,
        prompt=[9] * prompt_len,
        max_tokens=max_tokens,
        num_sequences=count,
        num_returned=count if beam is None else draw(st.sampled_from([1, count])),
        beam=beam,
        stop=draw(st.sampled_from([frozenset[int](), frozenset({3, 11, 19})])),
        prompt_logprobs_start=draw(st.sampled_from([None, 1, 10])),
    )
    held = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count) | st.just([0] * count))
    if request.selects or not any(held):
        return request
    request = continued(request, held)
    unended = [replace(each, has_ended=False, token_ids=each.token_ids[:-1]) for each in request.emitted]
    return replace(request, emitted=unended) if all(each.has_ended for each in request.emitted) else request


@given(
    request=any_requests(),
    block_size=st.sampled_from([1, 3, 4, 16]),
    budget=st.integers(5, 30),
    num_host_blocks=st.sampled_from([0, 8, 100]),
    caches_on_host=st.booleans(),
    state_blocks=st.sampled_from([0, 1, 3]),
    mode=st.sampled_from(PreemptionMode),
    is_cached=st.booleans(),
    preempted_after=st.lists(st.integers(0, 12), max_size=3),
)
def test_a_request_runs_to_its_end_in_the_smallest_pool_that_it_is_admitted_to(
    request, block_size, budget, num_host_blocks, caches_on_host, state_blocks, mode, is_cached, preempted_after
):
    needed = max_blocks(request, make_config(block_size=block_size, state_blocks=state_blocks))
    config = make_config(
        # A sequence may be no longer than the pool, its last token included.
        num_blocks=max(needed, -(-request.max_len // block_size) + 2 * state_blocks),
        state_blocks=state_blocks,
        caches_on_host=caches_on_host,
        block_size=block_size,
        max_num_batched_tokens=max(budget, 10),
        num_host_blocks=num_host_blocks,
        preemption_mode=mode,
    )
    driver = Driver(config)
    if is_cached:
        driver.submit(make_request(0, prompt=request.prompt, max_tokens=1))
        driver.run_until_idle()
    driver.submit(request)
    for num_steps in preempted_after:
        driver.run_steps(num_steps)
        if request.key in driver.scheduler.running:
            driver.preempt(request)
    driver.finish(request)
    assert driver.finished >= {1}


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 3, 4, 16]))
def test_a_request_without_a_stop_holds_as_many_blocks_as_it_is_refused_for(prompt_len, max_tokens, count, block_size):
    request = make_request(1, prompt_len=prompt_len, max_tokens=max_tokens, num_sequences=count)
    driver = Driver(make_config(block_size=block_size, num_blocks=512), max_in_flight=1)
    driver.submit(request)
    most = 0
    while driver.plan() is not None:
        most = max(most, driver.scheduler.batch.blocks.pool.num_used)
        driver.deliver()
    assert driver.finished == {1}
    assert most == max_blocks(request, driver.scheduler.config)


def make_driver(max_in_flight: int = 1, **config) -> Driver:
    return Driver(make_config(**({"num_host_blocks": 32} | config)), max_in_flight)


def test_auto_swaps_several_sequences_and_recomputes_one():
    driver = make_driver()
    several = make_request(1, prompt_len=6, max_tokens=8, num_sequences=2)
    one = make_request(2, prompt_len=6, max_tokens=8)
    driver.submit(several, one)
    driver.run_steps(3)
    driver.preempt(several)
    driver.preempt(one)
    assert several.key in driver.scheduler.swapped
    assert one.key in driver.scheduler.waiting
    assert (driver.scheduler.num_preemptions, driver.scheduler.num_swap_outs) == (2, 1)
    driver.finish(several, one)


def test_what_the_prefix_cache_still_has_is_not_moved_back():
    driver = make_driver(block_size=4)
    request = make_request(1, prompt_len=8, max_tokens=8, num_sequences=2)
    driver.submit(request)
    driver.run_steps(3)
    driver.preempt(request)
    plan = driver.next_plan()
    assert (len(plan.swap_out), len(plan.swap_in)) == (4, 2)
    driver.deliver()
    driver.finish(request)
