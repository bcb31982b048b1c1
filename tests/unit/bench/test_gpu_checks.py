"""The checks of the GPU kernels and of a worker's graphs and swaps see what is wrong, be it a single row."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench import gpu_checks
from bench.gpu_checks import LIMITS, Check, check_groups, compare
from bench.gpu_model import config_of, make_model
from bench.gpu_problems import Heads, expected_attention, make_problem
from bench.gpu_runner_checks import Again, check_graphs, check_swaps
from kernels import cuda, reference
from kernels.reference import ScoreRule
from tests.support.cpu_kernels import without_packed_products
from worker_svc.device import block_moves
from worker_svc.models.llama import LlamaForCausalLM

SMALL = {
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


def checks_with(monkeypatch: pytest.MonkeyPatch, **changes: Callable[..., Any]) -> Iterator[Check]:
    """All checks of the reference in float32, with some operations replaced."""
    plain = {name: getattr(reference, name) for name in cuda.__all__}
    monkeypatch.setattr(gpu_checks, "cuda", SimpleNamespace(**plain | changes))
    for _, group in check_groups("cpu", (torch.float32,)):
        yield from group


def failures(checks: Iterator[Check]) -> set[str]:
    return {check.name for check in checks if not check.passed}


def test_operations_that_are_right_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failures(checks_with(monkeypatch)) == set()


@pytest.mark.parametrize("name", cuda.__all__)
def test_every_operation_is_checked(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise NotImplementedError(name)

    with pytest.raises(NotImplementedError, match=name):
        failures(checks_with(monkeypatch, **{name: broken}))


@pytest.mark.parametrize("name", ["add_rms_norm", "add_layer_norm"])
def test_a_residual_that_is_not_the_sum_is_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def lossy(x: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        normed, _ = getattr(reference, name)(x, residual, *others)
        return normed, residual

    assert failures(checks_with(monkeypatch, **{name: lossy})) == {f"{name}, residual"}


@pytest.mark.parametrize("part", [0, 1], ids=["keys", "values"])
def test_a_slot_that_was_not_written_is_seen(monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    def lossy(*arguments: torch.Tensor) -> torch.Tensor:
        pool, slots = arguments[5:]
        block, offset = divmod(int(slots[3]), pool.shape[3])
        before = pool[part, block, :, offset].clone()
        query = reference.rotary_and_cache(*arguments)
        pool[part, block, :, offset] = before
        return query

    assert failures(checks_with(monkeypatch, rotary_and_cache=lossy)) == {"rotary_and_cache, pool"}


def test_a_row_of_zeros_or_of_no_numbers_among_long_contexts_is_seen() -> None:
    problem = make_problem(((1, 5000), (512, 600), (1, 4096)), Heads(4, 2, 32), torch.bfloat16, "cpu")
    expected = expected_attention(problem, ScoreRule(0.1))
    actual = expected.to(torch.bfloat16)
    assert compare("attention", actual, expected).passed
    actual[0] = 0
    # Of all rows together it is less than what rounding may cost.
    assert (actual - expected).norm() / expected.norm() < LIMITS[torch.bfloat16]
    check = compare("attention", actual, expected)
    assert check.error == 1
    assert not check.passed
    actual[0, 0] = torch.nan
    assert not compare("attention", actual, expected).passed


class Idle(Again):
    """Replays nothing."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        super().record(work)
        return lambda: None


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """One that is not recorded for the CPU, which would go before graphs."""
    with without_packed_products():
        return make_model(config_of("llama-1b") | SMALL, torch.device("cpu"), torch.float32)


def test_the_check_of_graphs_sees_one_that_does_nothing(model: LlamaForCausalLM) -> None:
    assert check_graphs(model, Again(), np.random.default_rng(1), longest=60).passed
    assert not check_graphs(model, Idle(), np.random.default_rng(1), longest=60).passed


@pytest.mark.parametrize("lost", [None, 1, 2], ids=["nothing", "the second that leaves", "the second that comes"])
def test_the_check_of_swaps_sees_one_that_is_lost(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, lost: int | None
) -> None:
    swap_blocks = block_moves.ops.swap_blocks
    num_calls = 0

    def lossy(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        # Each time one leaves, then it comes back.
        if lost is None or num_calls != 2 + lost:
            swap_blocks(*arguments)

    monkeypatch.setattr(block_moves.ops, "swap_blocks", lossy)
    check = check_swaps(model, np.random.default_rng(1), blocks_a_row=4, rounds=3)
    assert check.passed == (lost is None)
    assert num_calls == 6
