import json
import shlex
import sys
from pathlib import Path

import pytest

from bench.report import Series, write_results


def test_results_say_what_was_measured_where_and_of_which_commit(tmp_path: Path) -> None:
    write_results(tmp_path / "results.json", "a title", [Series("rate", "1/s", (1.0, 3.0, 2.0))], note="x")
    result = json.loads((tmp_path / "results.json").read_text())
    assert result["series"] == [{"name": "rate", "unit": "1/s", "median": 2.0, "values": [1.0, 3.0, 2.0]}]
    assert result["commit"]
    assert {"processor", "cores", "instruction_set", "load_at_start", "python"} == result["machine"].keys()
    assert "quire" in result["versions"]
    assert result["note"] == "x"


def test_the_command_of_a_result_runs_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["bench", "servers", "--load", "--dataset sharegpt --num-requests 64"]
    monkeypatch.setattr(sys, "orig_argv", ["/venv/bin/python", "-m", *flags])
    write_results(tmp_path / "results.json", "a title", [])
    command = json.loads((tmp_path / "results.json").read_text())["command"]
    assert shlex.split(command) == ["python", "-m", *flags]
