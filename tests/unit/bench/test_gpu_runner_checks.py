"""The checks of a worker's graphs and swaps pass on the CPU, and fail when something is wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_model import config_of, make_model
from bench.gpu_runner_checks import Again, check_graphs, check_swaps
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
