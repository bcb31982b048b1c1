"""Beam searches in different steps join one step, if that pays, and no other request waits for that."""

import numpy as np
import pytest

from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.request import Request
from scheduler_svc.core.step import StepInFlight
from tests.support.core_driver import Driver, make_config, make_request

WIDTH = 4
NUM_GROUPS = 8
ALL_ROWS = WIDTH * NUM_GROUPS


def make_beams(handle: int, max_tokens: int = 20) -> Request:
    beam = BeamParameters(WIDTH)
    return make_request(handle, max_tokens=max_tokens, num_sequences=WIDTH, num_returned=WIDTH, beam=beam)


def driver_with_halves(**changes) -> Driver:
    """A driver with half of the searches in one step in flight, and half in the other."""
    settings = {"num_blocks": 600, "max_num_seqs": ALL_ROWS, "max_num_batched_tokens": 64}
    driver = Driver(make_config(**(settings | changes)), max_in_flight=2)
    for first in (0, NUM_GROUPS // 2):
        for handle in range(first, first + NUM_GROUPS // 2):
            driver.submit(make_beams(handle))
        assert driver.plan() is not None
    return driver


def rows_of_steps(driver: Driver, count: int, planning_s: float = 0.0) -> list[int]:
    """The rows of each of the next steps. A step takes a second, and the scheduler `planning_s` to plan the next."""
    sizes: list[int] = []
    while len(sizes) < count:
        driver.deliver()
        driver.clock += planning_s
        while (plan := driver.plan()) is not None:
            sizes.append(len(plan.rows))
    return sizes


def test_searches_that_came_in_two_steps_go_on_in_one():
    assert rows_of_steps(driver_with_halves(), 8) == [ALL_ROWS] * 8


def test_they_stay_apart_where_the_scheduler_takes_long_beside_a_step():
    assert rows_of_steps(driver_with_halves(), 8, planning_s=0.5) == [ALL_ROWS // 2] * 8


def test_no_other_row_waits_for_a_search():
    driver = driver_with_halves(max_num_seqs=ALL_ROWS + 1)
    driver.submit(make_request(NUM_GROUPS, max_tokens=20))
    # The chunk of the new prompt joins the half that can run, and its row is in every later step.
    sizes = rows_of_steps(driver, 8)
    assert sizes[0] == ALL_ROWS // 2 + 1
    assert min(sizes[1:]) >= 1
    plain_steps = sum(1 for size in sizes if size % WIDTH)
    assert plain_steps == len(sizes)


def test_a_request_that_fits_enters_without_waiting():
    driver = driver_with_halves(max_num_seqs=ALL_ROWS + WIDTH)
    driver.submit(make_beams(NUM_GROUPS))
    driver.deliver()
    plan = driver.next_plan()
    assert len(plan.assign) == 1


def test_a_request_without_room_keeps_no_search_apart():
    driver = driver_with_halves()
    driver.submit(make_beams(NUM_GROUPS))
    assert rows_of_steps(driver, 4) == [ALL_ROWS] * 4
    driver.run_until_idle()


@pytest.mark.parametrize(("planning_s", "is_worth_it"), [(0.37, True), (0.38, False)])
def test_only_the_first_plan_after_a_result_tells_how_long_planning_takes(planning_s, is_worth_it):
    driver = driver_with_halves()
    rows_of_steps(driver, 3, planning_s=0.5)
    # A step then takes 1.5 s from the earlier result to its own.
    driver.deliver()
    driver.clock += planning_s
    joins = driver.plan() is None
    assert joins is is_worth_it
    if joins:
        # An arrival may trigger another plan at any time.
        driver.clock += 0.5
        assert driver.plan() is None


def test_prompts_are_no_measure_of_how_long_steps_take():
    driver, pace = driver_with_halves(), Pace()
    driver.deliver()
    rows = driver.scheduler.batch.rows
    assert not pace.beams_should_wait(rows)
    pace.answered(make_step(0.0), 1.0)
    pace.planning(1.5)
    assert not pace.beams_should_wait(rows)
    pace.answered(make_step(1.5, has_chunks=True), 101.5)
    pace.planning(102.0)
    assert not pace.beams_should_wait(rows)
    pace.answered(make_step(102.0), 104.0)
    pace.planning(104.5)
    assert pace.beams_should_wait(rows)


def make_step(planned: float, *, has_chunks: bool = False) -> StepInFlight:
    none = np.array([], dtype=np.int64)
    return StepInFlight(1, none, none, None, none, none, none, planned, has_chunks, none)
