"""The measurements of the core, on few sequences."""

import pytest

from bench import core_calls
from bench.core import time_steps
from bench.core_calls import CALLS, measure_calls
from bench.core_load import steady_load, turning_load
from bench.core_logprobs import NUMBERS_OF_TOP, time_logprob_steps
from bench.parts import PartTimes
from bench.waiting_memory import measure_waiting


def test_every_step_of_a_steady_batch_is_timed() -> None:
    schedule, apply, parts = time_steps(steady_load(8, 60), 8, 40, None)
    assert len(schedule) == len(apply) == 40
    assert min(schedule.min(), apply.min()) > 0
    assert parts == {}


def test_the_parts_of_a_batch_that_turns_over_have_time_each() -> None:
    _, _, parts = time_steps(turning_load(8, 200), 20, 200, PartTimes())
    names = {"make room", "decodes", "prefills and admission", "commit", "seal", "ends", "tokens", "rest of schedule"}
    assert parts.keys() == names
    assert min(parts.values()) > 0


def test_a_load_that_ends_too_early_is_refused() -> None:
    with pytest.raises(ValueError, match="give more requests"):
        time_steps(turning_load(4, 4), 2, 5000, None)


def test_a_warm_up_shorter_than_the_steps_in_flight_is_refused() -> None:
    with pytest.raises(ValueError, match="warm_up is 1, must be at least 2"):
        time_steps(steady_load(4, 20), 1, 10, None)


def test_a_waiting_request_costs_at_least_its_tokens_and_little_more_than_the_prompt_twice() -> None:
    waiting = measure_waiting(200)
    assert waiting.bytes_each == pytest.approx(sum(waiting.by_file.values()), rel=0.05)
    assert 161 * 8 < waiting.bytes_each < 161 * 80


def test_every_rare_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_calls, "_LONG_PROMPT", 5_000)
    times = measure_calls(8, 2)
    assert [each.name for each in times] == [name for name, _ in CALLS]
    assert all(len(each.values) == 2 and min(each.values) > 0 for each in times)


@pytest.mark.parametrize("num_top", NUMBERS_OF_TOP)
def test_steps_with_log_probabilities_are_timed_with_their_messages(num_top) -> None:
    times = time_logprob_steps(8, num_top, 20)
    assert len(times) == 20
    assert times.min() > 0
