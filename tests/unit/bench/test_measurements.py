"""The measurements without a server, on few sequences: what their numbers count, and what they refuse to count."""

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest

from bench import core_calls, logprobs
from bench.core import time_steps
from bench.core_calls import CALLS, measure_calls
from bench.core_load import turning_load
from bench.core_logprobs import time_logprob_steps
from bench.parts import Part, PartTimes
from bench.report import Series, write_results
from bench.rule_source import Drive, RuleSource, key_of
from bench.sharing import saved, shareable
from bench.waiting_memory import measure_waiting
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler


def test_every_step_of_a_batch_is_timed_and_has_time_in_each_part() -> None:
    schedule, apply, parts = time_steps(turning_load(8, 200), 20, 200, PartTimes())
    assert len(schedule) == len(apply) == 200
    assert min(schedule.min(), apply.min()) > 0
    names = {"make room", "decodes", "prefills and admission", "commit", "seal", "ends", "tokens", "rest of schedule"}
    assert parts.keys() == names
    assert min(parts.values()) > 0


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
