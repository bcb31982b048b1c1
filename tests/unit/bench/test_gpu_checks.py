"""The checks of the GPU kernels and of a worker's graphs and swaps find faults, even in a single row."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_checks
from bench.attention_problems import Heads, expected_attention, make_problem
from bench.gpu_checks import LIMITS, Check, check_groups, compare
from bench.gpu_model import config_of, make_model, step_bytes
from bench.gpu_steps import NUM_STEPS, DecodeRun
from quire_kernels import reference
from quire_kernels.backends import GpuOperations
from quire_kernels.reference import ScoreRule
from tests.support.graph_recorder import CallingRecorder

OPERATIONS = [name for name in dir(GpuOperations) if not name.startswith("_")]


def checks_with(monkeypatch: pytest.MonkeyPatch, **changes: Callable[..., Any]) -> Iterator[Check]:
    """All checks with the reference in float32, with some operations replaced."""
    plain = {name: getattr(reference, name) for name in OPERATIONS}
    monkeypatch.setattr(gpu_checks, "cuda", SimpleNamespace(**plain | changes))
    for _, group in check_groups("cpu", (torch.float32,)):
        yield from group


def failures(checks: Iterator[Check]) -> set[str]:
    return {check.name for check in checks if not check.passed}


def test_operations_that_are_right_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(checks_with(monkeypatch)) == set()


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_checked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise NotImplementedError(name)

    with pytest.raises(NotImplementedError, match=name):
        failures(checks_with(monkeypatch, **{name: broken}))


def test_a_row_of_zeros_or_of_no_numbers_among_long_contexts_is_seen() -> None:
    problem = make_problem(((1, 5000), (512, 600), (1, 4096)), Heads(4, 2, 32), torch.bfloat16, "cpu")
    expected = expected_attention(problem, ScoreRule(0.1))
    actual = expected.to(torch.bfloat16)
    assert compare("attention", actual, expected).passed
    actual[0] = 0
    # Over all rows together the error is less than the limit for rounding.
    assert (actual - expected).norm() / expected.norm() < LIMITS[torch.bfloat16]
    check = compare("attention", actual, expected)
    assert check.error == 1
    assert not check.passed
    actual[0, 0] = torch.nan
    assert not compare("attention", actual, expected).passed


def test_decode_steps_with_graphs_read_all_weights_but_the_embedding_and_the_keys_and_values() -> None:
    small = {"vocab_size": 1200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = make_model(config_of("llama-1b") | small | heads, torch.device("cpu"))
    layer = 32 * (4 * 8 + 2 * 2 * 8) + 32 * 32 + 3 * 32 * 48 + 2 * 32
    weights = 2 * (2 * layer + 32 + 32 * 1200)
    assert step_bytes(model) == weights
    run = DecodeRun(model, 3, 20, recorder := CallingRecorder())
    assert run.step_bytes == weights + 3 * 20 * 2 * 2 * 2 * 8 * 2
    times = run.measure(NUM_STEPS)
    assert 0 < times.model <= times.whole
    assert recorder.replays.total() > NUM_STEPS
