"""Floors of loads, and result files that several runs fill."""

import json
from pathlib import Path

import pytest

from bench.floors import Load, Rates, Work
from bench.report import Series, add_results


def test_a_pass_takes_the_longer_of_its_bytes_and_operations_and_a_load_the_sum_of_its_passes() -> None:
    rates = Rates(read=10.0, plain=100.0, layers=200.0)
    work = Work(layer_bytes=100, layer_flops=10, head_bytes=50, head_flops=20, kv_bytes=1, pair_flops=10)
    assert work.seconds(rates, new=1, sampled=0, read=0, pairs=0) == pytest.approx(10)
    assert work.seconds(rates, new=1000, sampled=0, read=0, pairs=0) == pytest.approx(50)
    assert work.seconds(rates, new=1, sampled=100, read=0, pairs=0) == pytest.approx(10 + 20)
    assert work.seconds(rates, new=1, sampled=1, read=200, pairs=100) == pytest.approx(10 + 5 + 20)
    # A prompt of 100 tokens, then 63 steps whose attention is bound by operations.
    steps = sum(10 + 5 + length / 10 for length in range(101, 164))
    assert Load(1, 100, "greedy").floor_s(work, rates) == pytest.approx(10 + 5 + 500 + steps)


def test_a_file_keeps_figures_of_other_names_and_the_run_of_each(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    add_results(path, "a title", [Series("a", "s", (1.0,)), Series("b", "s", (2.0,))], rates={"a": 1, "b": 2})
    add_results(path, "a title", [Series("b", "s", (3.0,))], rates={"b": 3})
    result = json.loads(path.read_text())
    assert [(each["name"], each["median"]) for each in result["series"]] == [("a", 1.0), ("b", 3.0)]
    assert result["rates"] == {"a": 1, "b": 3}
    assert [run.keys() for run in result["runs"]] == [{"date", "command", "commit"}]
