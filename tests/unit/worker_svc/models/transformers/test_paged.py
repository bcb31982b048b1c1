"""Attention of transformers' models over a pool of one geometry."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.runtime.settings import ConfigurationError
from quire_kernels import int8
from tests.support.models import make_model
from tests.support.paged import PagedRunner, Span
from worker_svc.models.registry import load_model
from worker_svc.models.transformers.paged import LayerShape, PoolShape, UnsupportedModelError

CPU = torch.device("cpu")
PLAIN = LayerShape(
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    value_dim=16,
    scale=0.25,
    sliding_window=None,
    soft_cap=None,
    alibi_slopes=None,
    sinks=None,
    needs_exact_keys=False,
)


@pytest.mark.parametrize(
    ("layers", "pool"),
    [
        ([PLAIN], PoolShape(4, 16)),
        ([replace(PLAIN, value_dim=8)], PoolShape(4, 16)),
        ([replace(PLAIN, value_dim=24)], PoolShape(4, 24)),
        ([PLAIN, replace(PLAIN, num_kv_heads=1, head_dim=32, value_dim=32)], PoolShape(4, 32)),
        ([replace(PLAIN, num_kv_heads=2), replace(PLAIN, num_kv_heads=8)], PoolShape(8, 16)),
    ],
)
def test_the_pool_holds_the_widest_heads_and_the_most(layers: list[LayerShape], pool: PoolShape) -> None:
    assert PoolShape.of(layers) == pool


@pytest.mark.parametrize(
    "other", [replace(PLAIN, num_heads=9, num_kv_heads=3), replace(PLAIN, num_heads=2, num_kv_heads=2)]
)
def test_heads_that_cannot_be_repeated_are_refused(other: LayerShape) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"keys of {other.num_kv_heads} and of 4 heads"):
        PoolShape.of([PLAIN, other])


def make_runner_of_int8(directory: Path, family: str) -> PagedRunner:
    make_model(directory, family)
    model = load_model(directory, device=CPU, dtype=torch.float32, model_impl="transformers")
    runner = PagedRunner(model, [[5, 9, 200, 31]], block_size=4)
    shape = (*runner.pools[0].shape[:-1], int8.line_bytes(model.head_dim))
    runner.pools = [torch.zeros(shape, dtype=torch.int8) for _ in runner.pools]
    return runner


@pytest.mark.parametrize("family", ["deepseek-v2", "gemma4-shared", "bloom", "granite-swa"])
def test_a_pool_of_int8_takes_padded_and_repeated_heads(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "again", family)
    actual = make_runner_of_int8(tmp_path, family).step(Span(0, 0, 4))
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 9, 200, 31]])).logits[0]
    assert (actual - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_a_pool_of_int8_is_refused_where_it_would_lose_keys(tmp_path: Path) -> None:
    runner = make_runner_of_int8(tmp_path, "falcon-alibi")
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype is int8, which is too coarse"):
        runner.step(Span(0, 0, 4))
