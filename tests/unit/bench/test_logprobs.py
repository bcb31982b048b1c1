"""What log probabilities of prompts cost, measured on messages that are whole."""

import argparse
import json
from pathlib import Path

import pytest

from bench import logprobs


def test_each_process_is_timed_on_what_the_one_before_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    logprobs.add_arguments(parser)
    out = tmp_path / "logprobs.json"
    logprobs.main(parser.parse_args(["--tokens", "50", "--top", "3", "--runs", "2", "--out", str(out)]))
    result = json.loads(out.read_text())
    assert [each["name"] for each in result["series"]] == ["scheduler's loop", "gateway's loop", "gateway's thread"]
    assert all(value > 0 for each in result["series"] for value in each["values"])
    # 4 bytes for each of 50 ids, log probabilities, ranks, and 3 pairs of them; the worker sends no ids.
    assert result["from_scheduler_bytes"] > 50 * 4 * (3 + 2 * 3) < result["from_worker_bytes"] + 50 * 4
    assert "scheduler's loop" in capsys.readouterr().out
