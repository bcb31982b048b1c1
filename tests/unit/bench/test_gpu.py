"""What the measurement of the GPU kernels does where it cannot measure, and how it takes errors."""

import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_findings import Findings
from bench.gpu_problems import Heads, expected_attention, make_problem
from kernels import ops
from kernels.reference import ScoreRule


def test_without_a_gpu_it_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # With a text, an interpreter prints it and exits with 1.
    with pytest.raises(SystemExit, match=r"\Abench\.gpu: torch sees no CUDA device[^\n]*\Z"):
        gpu.main(make_arguments())
    assert capsys.readouterr().out == ""


def test_speed_is_not_measured_in_the_interpreter() -> None:
    with pytest.raises(SystemExit, match="add --check-only"):
        gpu.main(Namespace(device="cpu", check_only=False))
    assert "TRITON_INTERPRET" not in os.environ


def make_arguments(*flags: str) -> Namespace:
    parser = ArgumentParser()
    gpu.add_arguments(parser)
    return parser.parse_args(list(flags))


def test_a_run_of_some_groups_leaves_the_file_of_the_whole_one() -> None:
    assert gpu._path_of_results(make_arguments()) == gpu.RESULTS
    assert gpu._path_of_results(make_arguments("--only", "decode")) is None
    assert gpu._path_of_results(make_arguments("--only", "decode", "--out", "some.json")) == Path("some.json")
    assert gpu._path_of_results(make_arguments("--check-only", "--out", "some.json")) is None


def test_a_name_that_no_group_begins_with_is_refused() -> None:
    gpu._check_names(["decode", "tilings of p", "mem"], "llama-1b")
    with pytest.raises(SystemExit, match="--only: no group begins with decade; there are memory, decode, prefill, "):
        gpu._check_names(["decode", "decade"], "llama-1b")


def test_another_run_keeps_the_seed_of_what_it_goes_on_with(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    Findings(7).write(path, {})
    assert gpu._begin(make_arguments("--resume", str(path))).seed == 7
    assert gpu._begin(make_arguments("--resume", str(path), "--seed", "7")).seed == 7
    assert gpu._begin(make_arguments("--seed", "8")).seed == 8
    with pytest.raises(SystemExit, match=r"--seed is 8; what .* holds was drawn with 7"):
        gpu._begin(make_arguments("--resume", str(path), "--seed", "8"))


def test_no_group_of_checks_is_begun_after_the_deadline() -> None:
    findings = Findings(7)
    gpu._run(make_arguments("--check-only", "--device", "cpu"), findings, time.monotonic() - 1)
    assert (findings.checks, findings.begun) == ([], [])
    assert "worker" in findings.late
    with pytest.raises(SystemExit, match="no time left"):
        gpu._report(findings)


def test_groups_are_chosen_by_the_start_of_their_names() -> None:
    groups = [(name, iter((name,))) for name in ("decode", "tilings of decode", "step", "serving")]
    assert [name for name, _ in gpu._chosen(groups, ["de", "step"])] == ["decode", "step"]
    assert list(gpu._chosen(groups, None)) == groups


@pytest.mark.parametrize(
    "rule",
    [
        ScoreRule(0.3),
        ScoreRule(0.3, sliding_window=4, soft_cap=2.0, alibi_slopes=torch.tensor([0.5, 0.1, 1.0, 0.0])),
        ScoreRule(0.3, sliding_window=4, sinks=torch.tensor([0.5, -3.0, 4.0, 0.0])),
    ],
    ids=["plain", "window, cap and alibi", "window and sinks"],
)
def test_its_float64_attention_is_that_of_the_operation(rule: ScoreRule) -> None:
    rows = [(1, 9), (4, 4), (3, 20)]
    problem = make_problem(rows, Heads(4, 2, 16), torch.float32, "cpu", block_size=5, poisoned=True)
    options = {name: getattr(rule, name) for name in ("scale", "sliding_window", "soft_cap", "alibi_slopes", "sinks")}
    actual = ops.paged_attention(*problem.tensors, **options, **problem.limits)
    torch.testing.assert_close(actual.double(), expected_attention(problem, rule), rtol=1e-5, atol=1e-5)
