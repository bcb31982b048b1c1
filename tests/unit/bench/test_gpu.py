"""What the measurement of the GPU kernels does where it cannot measure, and how it takes errors."""

import os
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from bench import gpu
from bench.gpu_problems import Heads, expected_attention, make_problem
from kernels import ops
from kernels.reference_attention import ScoreRule


def test_without_a_gpu_it_ends_with_one_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "bench.gpu"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr.startswith("bench.gpu: torch sees no CUDA device")
    assert run.stderr.count("\n") == 1


def test_speed_is_not_measured_in_the_interpreter() -> None:
    with pytest.raises(SystemExit, match="add --check-only"):
        gpu.main(Namespace(device="cpu", check_only=False))
    assert "TRITON_INTERPRET" not in os.environ


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
