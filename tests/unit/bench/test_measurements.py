"""The measurements without a server, on few sequences: what their numbers count, and inputs that they refuse."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from bench import core_calls
from bench.core import time_steps
from bench.core_calls import CALLS, measure_calls
from bench.core_load import turning_load
from bench.core_logprobs import time_logprob_steps
from bench.parts import PartTimes
from bench.report import Series, write_results
from bench.waiting_memory import measure_waiting


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
    times = list(measure_calls(8, 2))
    assert [each.name for each in times] == [f"8, {name}" for name, _ in CALLS]
    assert all(len(each.values) == 2 and min(each.values) > 0 for each in times)
    assert time_logprob_steps(8, 5, 20).min() > 0


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
