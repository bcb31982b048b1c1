"""Products from packed weights against plain ones, and which weights are packed."""

from pathlib import Path

import pytest
import torch

from tests.support.models import make_shape
from tests.support.paged import PagedRunner, Span
from worker_svc.layers import product
from worker_svc.layers.activation import ACTIVATIONS, ActivationKind
from worker_svc.layers.product import OwnProduct, PackedProduct, PlainProduct, make_product, pays_to_pack
from worker_svc.models.registry import load_model

PLAIN = [ActivationKind(name) for name in ACTIVATIONS]
GATED = [ActivationKind(name, gated=True) for name in ACTIVATIONS]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def no_kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product.ops, "has_packed_products", lambda *_: False)


def make_weights(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out_features * 1000 + in_features)
    weight = torch.randn((out_features, in_features), generator=generator) * in_features**-0.5
    return weight.to(dtype), torch.randn(out_features, generator=generator).to(dtype)


def make_tokens(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((count, width), generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_as_plain(
    weight: torch.Tensor, bias: torch.Tensor | None, kind: ActivationKind | None, tokens: torch.Tensor
) -> None:
    packed = PackedProduct.of(weight, bias, kind)(tokens)
    function = None if kind is None else kind.function
    exact = PlainProduct(weight.float(), None if bias is None else bias.float(), function)(tokens.float())
    assert packed.dtype == weight.dtype
    torch.testing.assert_close(packed.float(), exact, rtol=TOLERANCE[weight.dtype], atol=TOLERANCE[weight.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (96, 64), (257, 130), (512, 768)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_product_equals_the_plain_one(
    out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = make_weights(out_features, in_features, dtype)
    for count in (0, 1, 3, 16, 65):
        assert_as_plain(weight, bias if has_bias else None, None, make_tokens(count, in_features, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_every_activation_of_a_packed_product_equals_torchs(kind: ActivationKind, dtype: torch.dtype) -> None:
    weight, bias = make_weights(48, 40, dtype)
    assert_as_plain(weight, bias, kind, 4 * make_tokens(5, 40, dtype))


@pytest.mark.parametrize("kind", [None, *PLAIN], ids=str)
def test_nan_is_not_hidden_by_an_activation(kind: ActivationKind | None) -> None:
    weight, bias = make_weights(48, 40, torch.float32)
    tokens = make_tokens(3, 40, torch.float32)
    tokens[1, 7] = torch.nan
    packed = PackedProduct.of(weight, bias, kind)(tokens)
    assert packed.isnan().any(dim=1).tolist() == [False, True, False]


def test_a_packed_product_takes_tokens_that_are_not_contiguous() -> None:
    weight, bias = make_weights(48, 40, torch.float32)
    assert_as_plain(weight, bias, None, make_tokens(5, 80, torch.float32)[:, ::2])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("kind", [None, *PLAIN, *GATED], ids=str)
def test_every_activation_of_our_own_product_equals_torchs(
    kind: ActivationKind | None, dtype: torch.dtype, tolerance: float
) -> None:
    weight, bias = make_weights(48, 40, dtype)
    tokens = 4 * make_tokens(5, 40, dtype)
    function = None if kind is None else kind.function
    exact = PlainProduct(weight.float(), bias.float(), function)(tokens.float())
    own = OwnProduct.of(weight, bias, kind)(tokens)
    assert own.dtype == dtype
    torch.testing.assert_close(own.float(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_a_gated_product_of_float32_weights_halves_the_outputs(name: str) -> None:
    weight, bias = make_weights(512, 512, torch.float32)
    tokens = make_tokens(3, 512, torch.float32)
    gate, up = torch.nn.functional.linear(tokens, weight, bias).chunk(2, dim=-1)
    halved = make_product(weight, bias, ActivationKind(name, gated=True))(tokens)
    torch.testing.assert_close(halved, ACTIVATIONS[name](gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_to_our_own_kernel_where_there_is_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros((64, 64), dtype=dtype)
    assert isinstance(make_product(weight), OwnProduct)
    monkeypatch.setattr(product.ops, "has_packed_products", lambda *_: False)
    assert not isinstance(make_product(weight), OwnProduct)


def test_the_weights_are_not_changed_by_packing() -> None:
    weight, bias = make_weights(512, 512, torch.float32)
    before = weight.clone()
    make_product(weight, bias)(make_tokens(2, 512, torch.float32))
    assert torch.equal(weight, before)


def test_else_small_float32_weights_stay_plain_and_large_ones_are_packed(no_kernels_of_our_own: None) -> None:
    assert isinstance(make_product(torch.zeros(64, 64)), PlainProduct)
    assert isinstance(make_product(torch.zeros(512, 512)), PackedProduct)


def test_nothing_is_packed_for_other_devices_or_dtypes_or_without_entries() -> None:
    assert not pays_to_pack(torch.zeros((1024, 1024), device="meta"))
    assert not pays_to_pack(torch.zeros((1024, 1024), dtype=torch.float64))
    assert not pays_to_pack(torch.zeros((0, 1024)))


def test_without_onednn_products_are_plain(no_kernels_of_our_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, bias = make_weights(512, 512, torch.float32)
    tokens = make_tokens(3, 512, torch.float32)
    plain = make_product(weight, bias, ActivationKind("relu"))
    assert isinstance(plain, PlainProduct)
    assert torch.equal(plain(tokens), torch.relu(torch.nn.functional.linear(tokens, weight, bias)))


@pytest.mark.parametrize("shape", ["gpt2-tied-32", "opt-pre-norm-32", "llama-gqa-untied-32"])
def test_a_model_of_any_products_says_the_same(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_shape(tmp_path, shape)
    sequence = [5, 9, 200, 31, 77, 8, 3]

    def logits() -> torch.Tensor:
        model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
        return PagedRunner(model, [sequence], block_size=4).step(Span(0, 0, len(sequence)))

    own = logits()
    monkeypatch.setattr(product.ops, "has_packed_products", lambda *_: False)
    plain = logits()
    torch.testing.assert_close(own, plain, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(product, "_LEAST_PACKED_FLOAT32", 1)
    torch.testing.assert_close(logits(), plain, rtol=1e-4, atol=1e-4)
