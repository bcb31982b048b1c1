"""The measurements without a server, on few sequences: what their numbers count, and what they refuse to count."""

import argparse
import asyncio
import json
import shlex
import sys
from pathlib import Path

import pytest

from bench import core_calls, logprobs
from bench.control import beside
from bench.core import time_steps
from bench.core_calls import CALLS, measure_calls
from bench.core_load import steady_load, turning_load
from bench.core_logprobs import time_logprob_steps
from bench.parts import Part, PartTimes
from bench.report import Series, write_results
from bench.rule_source import VOCAB_SIZE, Drive, RuleSource, key_of
from bench.sharing import Workload, mean_shares, saved, shareable
from bench.texts import real_prompts
from bench.waiting_memory import measure_waiting
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, StepResult


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def refused() -> None:
    raise ValueError("max_tokens is 33,100; at most 32,760 fit")


async def test_a_listener_that_ends_while_it_is_needed_is_an_error_and_others_end_with_the_work() -> None:
    ended: list[str] = []

    async def listen() -> None:
        try:
            await never()
        finally:
            ended.append("listener")

    async with asyncio.timeout(30):
        assert await beside(asyncio.sleep(0, 7), [listen(), listen()]) == 7
        assert ended == ["listener"] * 2
        with pytest.raises(ValueError, match="at most 32,760 fit"):
            await beside(never(), [never(), refused()])
        with pytest.raises(RuntimeError, match="a client's stream ended"):
            await beside(never(), [asyncio.sleep(0), never()])


def test_every_step_of_a_batch_is_timed_and_has_time_in_each_part() -> None:
    schedule, apply, parts = time_steps(turning_load(8, 200), 20, 200, PartTimes())
    assert len(schedule) == len(apply) == 200
    assert min(schedule.min(), apply.min()) > 0
    names = {"make room", "decodes", "prefills and admission", "commit", "seal", "ends", "tokens", "rest of schedule"}
    assert parts.keys() == names
    assert min(parts.values()) > 0


def test_a_load_that_ends_too_early_and_too_short_a_warm_up_are_refused() -> None:
    with pytest.raises(ValueError, match="give more requests"):
        time_steps(turning_load(4, 4), 2, 5000, None)
    with pytest.raises(ValueError, match="warm_up is 1, must be at least 2"):
        time_steps(steady_load(4, 20), 1, 10, None)


def test_a_waiting_request_costs_at_least_its_tokens_and_little_more_than_the_prompt_twice() -> None:
    waiting = measure_waiting(200)
    assert waiting.bytes_each == pytest.approx(sum(waiting.by_file.values()), rel=0.05)
    assert 161 * 8 < waiting.bytes_each < 161 * 80


def test_rare_calls_and_steps_with_log_probabilities_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_calls, "_LONG_PROMPT", 5_000)
    times = measure_calls(8, 2)
    assert [each.name for each in times] == [name for name, _ in CALLS]
    assert all(len(each.values) == 2 and min(each.values) > 0 for each in times)
    assert time_logprob_steps(8, 5, 20).min() > 0


def test_log_probabilities_of_prompts_are_timed_in_each_process(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    logprobs.add_arguments(parser)
    out = tmp_path / "logprobs.json"
    logprobs.main(parser.parse_args(["--tokens", "50", "--top", "3", "--runs", "2", "--out", str(out)]))
    result = json.loads(out.read_text())
    assert all(value > 0 for each in result["series"] for value in each["values"])
    # 4 bytes for each of 50 ids, log probabilities, ranks, and 3 pairs of them; the worker sends no ids.
    assert result["from_scheduler_bytes"] > 50 * 4 * (3 + 2 * 3) < result["from_worker_bytes"] + 50 * 4


class _Kitchen:
    """Work whose parts take known times."""

    def __init__(self) -> None:
        self.now = 0.0

    def cook(self) -> None:
        self.now += 1.0
        self.chop()
        self.chop()

    def chop(self) -> None:
        self.now += 0.25

    def burn(self) -> None:
        self.now += 2.0
        raise RuntimeError("burnt")


def test_time_of_an_inner_part_does_not_count_for_the_outer_one_and_an_error_passes() -> None:
    kitchen = _Kitchen()
    times = PartTimes(lambda: kitchen.now)
    parts = [Part(name, _Kitchen, name) for name in ("cook", "chop", "burn")]
    with times.measure(parts):
        kitchen.cook()
        with pytest.raises(RuntimeError, match="burnt"):
            kitchen.burn()
    kitchen.cook()
    assert times.seconds == {"cook": 1.0, "chop": 0.5, "burn": 2.0}


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(
        num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, watermark=0.0
    )
    return Scheduler(config)


def test_beams_get_distinct_candidates_that_fall_until_the_search_ends() -> None:
    scheduler, source, seen = make_scheduler(), RuleSource(4), list[StepResult]()
    beams = BeamParameters(3)
    scheduler.submit(
        Request(key_of(0), "beams", [1, 2, 3], RowSampling(0), 5, num_sequences=3, num_returned=1, beam=beams), 0.0
    )

    def watched(plan: StepPlan) -> StepResult:
        seen.append(source(plan))
        return seen[-1]

    drive = Drive(scheduler, watched)
    while drive.plan() is not None:
        drive.deliver()
    assert drive.is_idle
    assert len(seen) == 5
    for result in seen:
        assert len(result.candidates) == len(result.token_ids) == 3
        assert 0 <= result.token_ids.min() <= result.token_ids.max() < VOCAB_SIZE
        for candidates in result.candidates.values():
            assert len(set(candidates.token_ids)) == len(candidates.token_ids) == 6
            assert list(candidates.logprobs) == sorted(candidates.logprobs, reverse=True)


def test_one_row_fails_in_every_step_that_the_rule_names() -> None:
    scheduler = make_scheduler()
    for index in range(3):
        scheduler.submit(Request(key_of(index), str(index), [1, 2, 3], RowSampling(index), 8), 0.0)
    drive, failures = Drive(scheduler, RuleSource(4, fail_every=2), max_in_flight=1), list[int]()
    for _ in range(2):
        drive.plan()
        failures.append(sum(len(events.failed) for events in drive.deliver().values()))
    assert failures == [0, 1]


def test_two_samples_share_the_prompt_and_copy_the_block_that_they_part_in() -> None:
    scheduler = make_scheduler()
    drive = Drive(scheduler, RuleSource(4))
    request = Request(key_of(0), "0", list(range(40)), RowSampling(0), 8, num_sequences=2, num_returned=2)
    scheduler.submit(request, 0.0)
    for shared_blocks in (3, 2):
        drive.plan()
        assert saved(scheduler) == pytest.approx(shared_blocks / 6)
        assert shareable(scheduler) == pytest.approx(shared_blocks / 6)
        drive.deliver()


def test_requests_with_equal_prompts_share_nothing_in_the_measurement() -> None:
    work = Workload([[7] * 33] * 6, [4] * 6, width=1)
    assert mean_shares(Drive(make_scheduler(), RuleSource(4)), work, 2, (saved,)) == [0]


def test_prompts_of_real_text_have_the_lengths_asked_for_and_differ() -> None:
    prompts = real_prompts(lengths := [1, 2, 19, 512, 19])
    assert [len(prompt) for prompt in prompts] == lengths
    assert prompts[2] != prompts[4]


def test_results_say_what_was_measured_where_of_which_commit_and_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["bench", "servers", "--load", "--dataset sharegpt --num-requests 64"]
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", "-m", *flags])
    write_results(tmp_path / "results.json", "a title", [Series("rate", "1/s", (1.0, 3.0, 2.0))], note="x")
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["series"] == [{"name": "rate", "unit": "1/s", "median": 2.0, "values": [1.0, 3.0, 2.0]}]
    assert result["commit"]
    assert {"processor", "cores", "instruction_set", "load_at_start", "python"} == result["machine"].keys()
    assert "quire" in result["versions"]
    assert shlex.split(result["command"]) == ["python", "-m", *flags]
