"""Weights as files store them on a GPU: the numbers equal the dequantized weight, bit for bit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from quire.model_files.adapter_files import read_adapter
from quire_kernels import ops
from quire_kernels.cuda import coded
from quire_kernels.packed_weight import Coding, Quantization
from quire_kernels.reference import activated
from tests.support.adapters import make_adapter
from tests.support.coded_weights import SCALED, dequantized, make_coded, make_scaled
from tests.support.gguf_files import write_gguf
from tests.support.models import make_model
from tests.support.paged import PagedRunner, Span, codings_of
from tests.support.tiers import parametrize_in_turn
from tests.support.triton_devices import KernelDevice
from tests.unit.worker_svc.test_gguf_weights import CODED, CODED_SIZES, code_as_a_mix
from worker_svc.layers.embedding_norm import TiedHead
from worker_svc.layers.linear import Linear
from worker_svc.loaded_adapters import AdapterSlots
from worker_svc.models.registry import load_model

pytestmark = pytest.mark.extended


@given(
    coding=st.sampled_from(Coding),
    out_features=st.integers(1, 40),
    num_groups=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_looked_up_rows_are_those_of_the_dequantized_weight(
    coding: Coding, out_features: int, num_groups: int, seed: int
) -> None:
    weight = make_coded(coding, out_features, num_groups, seed)
    codes, _, scale = coded.read(weight)
    assert torch.equal(scale.numbers(codes), dequantized(weight))
    if weight.scales is None:
        ids = torch.tensor([out_features - 1, 0, 0])
        assert torch.equal(coded.look_up(weight, ids), dequantized(weight).bfloat16()[ids])


@parametrize_in_turn("coding, num_tokens", Coding, [(17,), (1,)])
def test_products_are_those_of_the_dequantized_weight(device: KernelDevice, coding: Coding, num_tokens: int) -> None:
    """The number of outputs is larger than a tile, and no multiple of it."""
    for seed in range(3 if coding in SCALED else 1):
        weight = make_coded(coding, 40, 1 if coding.group[0] == 256 else 3, seed + num_tokens)
        x, bias, numbers = (
            torch.randn(num_tokens, weight.in_features).half(),
            torch.randn(40).half(),
            dequantized(weight),
        )
        packed = coded.pack_coded(weight, False, Quantization.NONE)
        actual = device.run(coded.product, x, packed, bias, "identity", torch.float32).result
        expected = x.double() @ numbers.half().double().t() + bias.double()
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
        if seed == 0:
            each = torch.eye(weight.in_features).half()
            actual = device.run(coded.product, each, packed, None, "identity", torch.float16).result
            assert torch.equal(actual.t(), numbers.half())


@pytest.mark.parametrize(("inputs", "has_zeros"), [(32, True), (128, False), (1024, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_groups_of_any_size_and_scales_of_any_dtype(
    device: KernelDevice, dtype: torch.dtype, inputs: int, has_zeros: bool
) -> None:
    weight = make_scaled(Coding.INT4, 5, 160, inputs, dtype, has_zeros=has_zeros)
    packed = coded.pack_coded(weight, False, Quantization.NONE)
    actual = device.run(coded.product, torch.eye(160).half(), packed, None, "identity", torch.float16).result
    assert torch.equal(actual.t(), dequantized(weight).half())


def test_activations_gates_and_several_weights(device: KernelDevice) -> None:
    weights = [make_coded(Coding.Q4_K, 24, 1), make_coded(Coding.Q6_K, 8, 1)]
    first, second = (coded.pack_coded(weight, False, Quantization.NONE) for weight in weights)
    x, bias = torch.randn(2, 3, 256).half(), torch.randn(32).half()
    sums = device.run(coded.product, x, first, bias[:24], "identity", torch.float32).result
    for is_gated, activation in ((True, "silu"), (False, "relu")):
        weight = replace(first, gated=is_gated)
        actual = device.run(coded.product, x, weight, bias[:24], activation, torch.float16).result
        assert torch.equal(actual, activated(sums, is_gated, activation, torch.float16))
    joined = device.run(coded.products, x, [first, second], bias, torch.float16).result
    assert torch.equal(joined[..., :24], sums.half())
    assert joined.shape == (2, 3, 32)


def test_several_programs_share_the_inputs_of_few_tokens(device: KernelDevice) -> None:
    """The shares may be uneven; one program adds the bias. More tokens are summed by one program."""
    weight = make_coded(Coding.Q8_0, 3, 33)
    packed = coded.pack_coded(weight, False, Quantization.NONE)
    x, bias = torch.randn(17, 1056).half(), torch.randn(3).half()
    few = device.run(coded.product, x[:2], packed, bias, "identity", torch.float32).result
    many = device.run(coded.product, x, packed, bias, "identity", torch.float32).result
    expected = x.double() @ dequantized(weight).half().double().t() + bias.double()
    torch.testing.assert_close(many.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(few.double(), expected[:2], rtol=1e-5, atol=1e-5)
    gates = replace(coded.pack_coded(make_coded(Coding.Q8_0, 4, 33), False, Quantization.NONE), gated=True)
    assert device.run(coded.product, x[:2], gates, None, "silu", torch.float16).result.shape == (2, 2)


def test_no_tokens_give_an_empty_result(device: KernelDevice) -> None:
    packed = coded.pack_coded(make_coded(Coding.Q8_0, 5, 1), False, Quantization.NONE)
    assert device.run(
        coded.product, torch.empty(0, 32).half(), packed, None, "identity", torch.float16
    ).result.shape == (0, 5)


@pytest.mark.parametrize("coding", Coding)
def test_a_weight_is_hardly_larger_than_in_the_file(coding: Coding) -> None:
    weight = make_coded(coding, 64, 2048 // coding.group[0] if coding not in SCALED else 16, 1)
    packed, scales = coded.pack_coded(weight, False, Quantization.NONE), weight.scales
    assert isinstance(packed, coded.GroupedWeight)
    of_scales = packed.scale.units, packed.scale.steps, packed.scale.minimum_units, packed.scale.minimum_steps
    held = sum(each.nbytes for each in (packed.data, packed.high, *of_scales) if each is not None)
    of_file = 0 if scales is None else (scales.values if scales.parts is None else scales.parts).nbytes
    assert held <= 1.05 * (weight.rows.nbytes + of_file)


def parts_of(plane: torch.Tensor, width: int) -> torch.Tensor:
    shifts = torch.arange(0, 8, width, dtype=torch.uint8)[:, None]
    return (plane.unflatten(1, (-1, 1, 32)) >> shifts & (1 << width) - 1).flatten(1)


def multiply_by_torch(
    kernel: Any,
    grid: tuple[int, ...],
    output: torch.Tensor,
    x: torch.Tensor,
    data: torch.Tensor,
    high: torch.Tensor | None,
    zeros: torch.Tensor | None,
    units: torch.Tensor,
    steps: torch.Tensor | None,
    minimum_units: torch.Tensor | None,
    minimum_steps: torch.Tensor | None,
    table: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_tokens: int,
    x_stride: int,
    num_outputs: int,
    num_inputs: int,
    turns: int,
    row_bytes: int,
    high_bytes: int,
    **constants: Any,
) -> None:
    """Does the work of the kernel in any dtype: the interpreter cannot multiply bfloat16."""
    of = SimpleNamespace(**constants)
    codes = data if of.BITS == 8 else parts_of(data, 4)
    if high is not None:
        codes = codes | parts_of(high, of.BITS - 4)[:, : codes.shape[1]] << 4
    scales = coded.Scales(
        units=units,
        inputs_of_unit=of.UNIT or num_inputs,
        zero=of.ZERO,
        zeros=zeros,
        kind=of.KIND,
        table=table,
        steps=steps,
        step_kind=of.STEP_KIND,
        inputs_of_step=of.STEP,
        minimum_units=minimum_units,
        minimum_steps=minimum_steps,
    )
    codes = codes[:, :num_inputs]
    sums = functional.linear(
        x.float(), scales.numbers(codes).to(x.dtype).float(), None if bias is None else bias.float()
    )
    output.copy_(sums.view(output.shape))


@pytest.mark.parametrize(
    ("family", "tied", "dtype"),
    [
        ("llama", False, torch.float16),
        pytest.param("qwen2", True, torch.float16, marks=pytest.mark.long),
        pytest.param("gemma2", True, torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_a_model_with_adapters_computes_what_that_of_dequantized_weights_does(
    tmp_path: Path, family: str, tied: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"tie_word_embeddings": tied, **CODED_SIZES}
    made = make_model(tmp_path / "model", CODED[family], **fields)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=code_as_a_mix)
    adapter = make_adapter(tmp_path / "adapter", made, rank=8, alpha=16.0, seed=1)
    monkeypatch.setattr(coded, "launch", multiply_by_torch)
    monkeypatch.setattr(ops, "coded_products_for", lambda device, dtype: coded)
    logits: list[torch.Tensor] = []
    for is_coded in (True, False):
        if not is_coded:
            monkeypatch.setattr(ops, "has_coded_products", lambda *_: False)
        model = load_model(file, device=torch.device("cpu"), dtype=dtype)
        if is_coded:
            layers = [layer for layer in model.modules() if isinstance(layer, Linear | TiedHead)]
            assert Coding.Q4_K in [coding for layer in layers for coding in codings_of(layer)]
        slots = AdapterSlots(model, 1, 8)
        slots.put(0, slots.load(adapter, read_adapter(adapter).digest))
        runner = PagedRunner(model, [list(range(3, 40)), list(range(5, 45))], block_size=4)
        runner.adapter_slots = [1, 0]
        logits.append(runner.step(Span(0, 0, 37), Span(1, 0, 40)).float())
    # Sums of bfloat16 layers differ by rounding.
    assert functional.cosine_similarity(logits[0], logits[1]).min() > 0.99
