"""A layer of experts in one operation gives the bits of the products one by one, and a router's choice is torch's."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels import ops
from quire_kernels.backends import recording_with
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.experts import ChoiceRule, Factor
from quire_kernels.packed_weight import Coding, PackedWeight, Quantization
from quire_kernels.recording import Recorder
from tests.support.coded_weights import make_coded, make_fp4
from tests.support.cpu_kernels import library_of, torch_threads
from tests.unit.kernels.cpu.test_product import make_kernels

RULE = ChoiceRule(3, False, True, 1, 1, 2, 1.0)
BOUND = 1e-6


def make_layer(
    pack: Callable[[int, int, bool], PackedWeight], count: int, hidden: int, inner: int, *, gated: bool, bias: bool
) -> tuple[list[Factor], list[Factor]]:
    """The two products of each expert."""

    def factor(out: int, inputs: int, gated: bool, activation: str) -> Factor:
        packed = pack(out, inputs, gated)
        return Factor(packed, torch.randn(out).to(packed.dtype) if bias else None, activation)

    rows = 2 * inner if gated else inner
    up = [factor(rows, hidden, gated, "silu" if gated else "relu") for _ in range(count)]
    return up, [factor(hidden, inner, False, "identity") for _ in range(count)]


def one_by_one(
    kernels: CpuKernels,
    x: torch.Tensor,
    layer: tuple[list[Factor], list[Factor]],
    weights: torch.Tensor,
    chosen: torch.Tensor,
) -> torch.Tensor:
    """The definition: [T, hidden]."""
    total = torch.zeros(x.shape)
    for token in range(len(x)):
        for place, expert in enumerate(chosen[token].tolist()):
            lines = x[token : token + 1]
            for factor in (layer[0][expert], layer[1][expert]):
                lines = kernels.product(lines, factor.weight, factor.bias, factor.activation, x.dtype)
            total[token] += lines[0].float() * weights[token, place]
    return total.to(x.dtype)


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    quantization=st.sampled_from(Quantization),
    num_tokens=st.sampled_from([1, 2, 7, 40, 150]),
    num_chosen=st.integers(1, 4),
    inner=st.integers(1, 70),
    gated=st.booleans(),
    bias=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_outputs_are_those_of_the_products_one_by_one(
    isa, dtype, quantization, num_tokens, num_chosen, inner, gated, bias, threads, seed
) -> None:
    torch.manual_seed(seed)
    kernels, hidden = make_kernels(isa), 96

    def pack(out: int, inputs: int, gated: bool) -> PackedWeight:
        return kernels.pack_weight((torch.randn(out, inputs) * inputs**-0.5).to(dtype), gated, quantization)

    layer = make_layer(pack, 5, hidden, inner, gated=gated, bias=bias)
    x, weights = torch.randn(num_tokens, hidden).to(dtype), torch.rand(num_tokens, num_chosen)
    chosen = torch.rand(num_tokens, 5).argsort(-1)[:, :num_chosen]
    with torch_threads(threads):
        found = kernels.experts(x, kernels.pack_experts(*layer), weights, chosen, None, None)
    assert torch.equal(found, one_by_one(kernels, x, layer, weights, chosen))


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8_DYNAMIC])
@pytest.mark.parametrize("coding", [Coding.Q4_K, Coding.Q6_K, Coding.Q8_0, Coding.MXFP4])
def test_experts_may_be_coded(isa: str, coding: Coding, quantization: Quantization) -> None:
    kernels = make_kernels(isa)

    def pack(out: int, inputs: int, gated: bool) -> PackedWeight:
        is_fp4 = coding is Coding.MXFP4
        weight = make_fp4(coding, out, inputs) if is_fp4 else make_coded(coding, out, inputs // coding.group[0])
        return kernels.pack_coded(weight, gated, quantization)

    layer = make_layer(pack, 4, 256, 256, gated=True, bias=coding is Coding.MXFP4)
    if coding is Coding.MXFP4:
        # As in GPT-OSS.
        layer = [replace(each, activation="clamped_swiglu") for each in layer[0]], layer[1]
    for num_tokens in (1, 5, 60):
        x, weights = torch.randn(num_tokens, 256).bfloat16() / 16, torch.rand(num_tokens, 2)
        chosen = torch.rand(num_tokens, 4).argsort(-1)[:, :2]
        found = kernels.experts(x, kernels.pack_experts(*layer), weights, chosen, None, None)
        assert found.isfinite().all()
        assert torch.equal(found, one_by_one(kernels, x, layer, weights, chosen))


@pytest.mark.parametrize("with_gate", [False, True])
def test_a_shared_expert_is_added_last(isa: str, with_gate: bool) -> None:
    kernels = make_kernels(isa)
    layer = make_layer(
        lambda out, inputs, gated: kernels.pack_weight(torch.randn(out, inputs) / 8, gated, Quantization.NONE),
        *(3, 64, 48),
        gated=True,
        bias=False,
    )
    x, weights, chosen = torch.randn(6, 64), torch.rand(6, 1), torch.randint(0, 3, (6, 1))
    shared, gate = torch.randn(6, 64), torch.randn(6, 1) * 4
    found = kernels.experts(x, kernels.pack_experts(*layer), weights, chosen, shared, gate if with_gate else None)
    expected = one_by_one(kernels, x, layer, weights, chosen) + (shared * gate.sigmoid() if with_gate else shared)
    torch.testing.assert_close(found, expected, rtol=BOUND, atol=BOUND)


def test_an_expert_that_there_is_not_is_refused(isa: str) -> None:
    kernels = make_kernels(isa)
    layer = make_layer(
        lambda out, inputs, gated: kernels.pack_weight(torch.randn(out, inputs), gated, Quantization.NONE),
        *(3, 64, 32),
        gated=True,
        bias=False,
    )
    for wrong in (-1, 3):
        chosen = torch.tensor([[0, 1], [2, wrong]])
        with pytest.raises(IndexError, match="chosen names an expert"):
            kernels.experts(torch.randn(2, 64), kernels.pack_experts(*layer), torch.rand(2, 2), chosen, None, None)


def expected_choice(
    outputs: torch.Tensor, rule: ChoiceRule, correction: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """By torch."""
    scores = outputs.float().sigmoid() if rule.sigmoid else outputs.float().softmax(-1)
    preferences = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        groups = preferences.unflatten(-1, (rule.num_groups, -1))
        best = groups.topk(rule.group_members).values.sum(-1).topk(rule.num_chosen_groups).indices
        left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        preferences = groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    chosen = preferences.topk(rule.num_chosen).indices
    weights = scores.gather(-1, chosen)
    return (weights / weights.sum(-1, keepdim=True) if rule.normalized else weights) * rule.scale, chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("count", [8, 200, 1024])
def test_the_choice_is_that_of_torch(
    isa: str, dtype: torch.dtype, sigmoid: bool, normalized: bool, num_groups: int, corrected: bool, count: int
) -> None:
    rule = replace(RULE, sigmoid=sigmoid, normalized=normalized, num_groups=num_groups, scale=2.5)
    rule = replace(rule, num_chosen_groups=2 if num_groups > 1 else 1)
    outputs = torch.randn(9, count, generator=torch.Generator().manual_seed(count)).to(dtype)
    correction = torch.rand(count) / 4 if corrected else None
    factors = torch.rand(count) if corrected else None
    weights, chosen = make_kernels(isa).choose_experts(outputs, rule, correction, factors)
    expected_weights, expected = expected_choice(outputs, rule, correction)
    expected_weights = expected_weights if factors is None else expected_weights * factors[chosen]
    torch.testing.assert_close(weights, expected_weights, rtol=BOUND, atol=BOUND)
    if dtype == torch.float32:  # In bfloat16 some are equal but for rounding.
        assert torch.equal(chosen, expected)


def test_of_equal_scores_torchs_are_chosen(isa: str) -> None:
    outputs = torch.randint(0, 3, (50, 64), generator=torch.Generator().manual_seed(1)).bfloat16()
    _, chosen = make_kernels(isa).choose_experts(outputs, replace(RULE, num_chosen=8), None)
    assert torch.equal(chosen, outputs.float().softmax(-1).topk(8).indices)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_a_token_that_is_not_finite_gets_experts_that_there_are(isa: str, sigmoid: bool) -> None:
    outputs = torch.randn(4, 16)
    outputs[1, 3], outputs[2] = torch.nan, torch.inf
    weights, chosen = make_kernels(isa).choose_experts(outputs, replace(RULE, sigmoid=sigmoid), None)
    assert ((chosen >= 0) & (chosen < 16)).all()
    assert weights[1].isnan().any()
    assert weights[[0, 3]].isfinite().all()


@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8_DYNAMIC])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_recording_chooses_experts_in_each_run(isa: str, threads: int, quantization: Quantization) -> None:
    library = library_of(isa)
    kernels = CpuKernels(library)
    most, hidden = 30, 64
    router = kernels.pack_weight(torch.randn(6, hidden).bfloat16(), False, Quantization.NONE)
    layer = make_layer(
        lambda out, inputs, gated: kernels.pack_weight((torch.randn(out, inputs) / 8).bfloat16(), gated, quantization),
        *(6, hidden, 128),
        gated=True,
        bias=True,
    )
    packed, x = kernels.pack_experts(*layer), torch.empty(most, hidden).bfloat16()

    def run(x: torch.Tensor) -> torch.Tensor:
        return ops.experts(x, packed, *ops.choose_experts(ops.product(x, router), RULE))

    recorder = Recorder(library, most)
    with recorder, recording_with(recorder.kernels):
        output = run(x)
    recording = recorder.recording((x, packed, router))
    for num_tokens in (1, 30, 7, 1):
        x.copy_(torch.randn(x.shape))
        with torch_threads(threads):
            recording.run(num_tokens, 1)
        with recording_with(kernels):
            assert torch.equal(output[:num_tokens], run(x[:num_tokens]))
