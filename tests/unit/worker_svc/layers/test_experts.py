"""Experts: a token's experts do not depend on the other tokens, and ranks share each expert."""

import re
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from quire_kernels.packed_weight import Quantization
from tests.support.cpu_kernels import ISAS
from worker_svc.layers.experts import Experts, ExpertsConfig
from worker_svc.parallel.ranks import Ranks
from worker_svc.weights import Loadable, MadeTensors, Placement, TensorSpec

HIDDEN, INNER, COUNT = 64, 96, 6
CONFIG = ExpertsConfig(COUNT, 3, INNER, normalized=True, shared_inner_size=32, shared_gate="shared_expert_gate")
CPU = torch.device("cpu")

needs_library = pytest.mark.skipif(not ISAS, reason="there is no library of kernels for the CPU, which promises it")


def make_tensor(spec: TensorSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, spec.name)))
    return torch.randn(spec.shape, generator=generator) * spec.shape[-1] ** -0.5


def make_experts(
    config: ExpertsConfig = CONFIG,
    *,
    dtype: torch.dtype = torch.float32,
    ranks: Ranks | None = None,
    quantization: Quantization = Quantization.NONE,
    make: Callable[[TensorSpec], torch.Tensor] = make_tensor,
) -> Experts:
    placement = Placement(CPU, dtype, ranks or Ranks(), quantization)
    experts = Experts("layer", config, HIDDEN, "silu", placement)
    for module in experts.modules():
        if isinstance(module, Loadable):
            module.load(MadeTensors(make))
    return experts


def make_tokens(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(count)).to(dtype)


def plain(config: ExpertsConfig, x: torch.Tensor) -> torch.Tensor:
    """The definition, token by token in float64."""

    def weight(name: str, *shape: int) -> torch.Tensor:
        return make_tensor(TensorSpec(f"layer.mlp.{name}.weight", shape)).double()

    def mlp(name: str, inner: int, token: torch.Tensor) -> torch.Tensor:
        gate, up = (weight(f"{name}.{each}_proj", inner, HIDDEN) @ token for each in ("gate", "up"))
        return weight(f"{name}.down_proj", HIDDEN, inner) @ (nn.functional.silu(gate) * up)

    results: list[Any] = []
    for token in x.double():
        scores = (weight("gate", config.count, HIDDEN) @ token).softmax(-1)
        chosen = sorted(range(config.count), key=lambda expert: -scores[expert])[: config.num_chosen]
        divisor = sum(scores[expert] for expert in chosen) if config.normalized else 1.0
        result = sum(mlp(f"experts.{expert}", INNER, token) * scores[expert] / divisor for expert in chosen)
        if config.shared_inner_size is not None:
            share = (weight("shared_expert_gate", 1, HIDDEN) @ token).sigmoid()
            result = result + share * mlp("shared_expert", config.shared_inner_size, token)
        results.append(result)
    return torch.stack(results)


@pytest.mark.parametrize("shared", [None, 32])
@pytest.mark.parametrize(("num_chosen", "normalized"), [(1, True), (3, False), (COUNT, True)])
def test_a_token_gets_the_weighted_sum_of_its_experts(num_chosen: int, normalized: bool, shared: int | None) -> None:
    config = replace(CONFIG, num_chosen=num_chosen, normalized=normalized, shared_inner_size=shared)
    x = make_tokens(9)
    torch.testing.assert_close(make_experts(config)(x).double(), plain(config, x), rtol=1e-5, atol=1e-5)


@needs_library
@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_the_same_whatever_is_beside_it(dtype: torch.dtype, quantization: Quantization) -> None:
    experts, x = make_experts(dtype=dtype, quantization=quantization), make_tokens(40, dtype)
    together = experts(x)
    assert together.dtype == dtype
    for rows in (slice(7, 8), slice(3, 20), slice(39, None), slice(0, 33)):
        assert torch.equal(experts(x[rows]), together[rows])
    assert torch.equal(experts(x.flip(0)), together.flip(0))
    assert experts(x[:0]).shape == (0, HIDDEN)


def test_an_expert_that_no_token_chose_is_not_multiplied_with() -> None:
    def make_only(chosen: Container[int], spec: TensorSpec) -> torch.Tensor:
        expert = re.search(r"experts\.(\d+)", spec.name)
        tensor = make_tensor(spec)
        return tensor.fill_(torch.nan) if expert is not None and int(expert[1]) not in chosen else tensor

    experts, x = make_experts(), make_tokens(1).expand(4, HIDDEN)
    _, chosen = experts._choose(x)
    assert torch.equal(make_experts(make=partial(make_only, chosen[0].tolist()))(x), experts(x))
    assert make_experts(make=partial(make_only, ()))(x).isnan().all()


@needs_library
@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_together_have_the_bits_of_experts_one_by_one(dtype: torch.dtype, quantization: Quantization) -> None:
    config = replace(CONFIG, shared_gate=None)
    together = make_experts(config, dtype=dtype, quantization=quantization)
    apart = make_experts(config, dtype=dtype, quantization=quantization)
    assert together._packed is not None
    apart.__dict__["_packed"] = None
    for count in (1, 2, 40):
        x = make_tokens(count, dtype)
        assert torch.equal(together(x), apart(x))


@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_all_ranks_make_up_the_whole(size: int) -> None:
    x = make_tokens(11)
    parts = [make_experts(ranks=Ranks(rank, size))(x) for rank in range(size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), make_experts()(x), rtol=1e-5, atol=1e-5)


@needs_library
def test_a_token_that_is_not_finite_stays_alone() -> None:
    experts, x = make_experts(), make_tokens(5)
    expected = experts(x)
    poisoned = x.clone()
    poisoned[2, 0] = float("nan")
    found = experts(poisoned)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
