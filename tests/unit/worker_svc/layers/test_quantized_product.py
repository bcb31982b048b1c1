"""Products of int8 weights against those of the same weights as they were."""

from pathlib import Path

import pytest
import torch

from kernels import ops
from kernels.int8 import quantize
from kernels.packed_weight import Rounding
from quire.settings import ConfigurationError
from tests.support.models import make_shape
from worker_svc.layers.activation import ACTIVATIONS, ActivationKind
from worker_svc.layers.linear import Linear
from worker_svc.layers.product import OwnProduct
from worker_svc.layers.quantization import Quantization
from worker_svc.layers.quantized_product import DynamicProduct, WeightOnlyProduct, make_linear_product
from worker_svc.models.registry import load_model

KINDS = (Quantization.INT8_WEIGHT_ONLY, Quantization.INT8_DYNAMIC)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.fixture(params=["own kernels", "torch"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(ops, "has_packed_products", lambda *_: False)
    return request.param


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bound(weight: torch.Tensor, x: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """The most that rounding can make of each output: half a scale of every weight, and of every input."""
    weight, x = weight.double(), x.double()
    weight_scale = weight.abs().amax(1, keepdim=True) / 127
    error = x.abs() @ torch.full_like(weight, 0.51).mul(weight_scale).T
    if quantization is Quantization.INT8_DYNAMIC:
        input_error = torch.full_like(x, 0.51) * x.abs().amax(1, keepdim=True) / 127
        error += input_error @ (weight.abs() + weight_scale).T
    return error


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (33, 24), (96, 64), (257, 130), (64, 768)])
@pytest.mark.parametrize("tokens", [0, 1, 8, 9, 40])
def test_result_is_as_near_as_rounding_allows(
    quantization: Quantization, dtype: torch.dtype, out_features: int, in_features: int, tokens: int, kernels: str
) -> None:
    weight = (noise(out_features, in_features) * in_features**-0.5).to(dtype)
    x, bias = noise(tokens, in_features, seed=1).to(dtype), noise(out_features, seed=2).to(dtype)
    got = make_linear_product(weight, bias, None, quantization)(x)
    exact = x.double() @ weight.double().T + bias.double()
    assert got.dtype == dtype
    assert got.shape == (tokens, out_features)
    allowed = bound(weight, x, quantization) + ROUNDING[dtype] * (1 + exact.abs() * 2)
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_activation_and_leading_dimensions_are_kept(quantization: Quantization, activation: str, kernels: str) -> None:
    weight, x = noise(32, 48) * 0.1, noise(2, 3, 48, seed=1)
    got = make_linear_product(weight, None, ActivationKind(activation), quantization)(x)
    plain = make_linear_product(weight, None, None, quantization)(x)
    torch.testing.assert_close(got, ACTIVATIONS[activation](plain))
    assert got.shape == (2, 3, 32)


@pytest.mark.parametrize("quantization", KINDS)
@pytest.mark.parametrize("tokens", [2, 20])
def test_zero_outliers_and_numbers_that_are_not_finite(quantization: Quantization, tokens: int, kernels: str) -> None:
    weight, x = noise(16, 32), noise(tokens, 32, seed=1)
    weight[3] = 0
    weight[5] *= 1e30
    x[0] = 0
    x[1, 7] = float("nan")
    got = make_linear_product(weight, None, None, quantization)(x)
    assert (got[0] == 0).all()
    assert not got[1, [0, 1, 5]].isfinite().any()
    assert got[2:].isfinite().all()
    assert (got[2:, 3] == 0).all()


@pytest.mark.parametrize("quantization", KINDS)
def test_a_token_gets_the_same_beside_others(quantization: Quantization, kernels: str) -> None:
    product = make_linear_product(noise(96, 64), None, None, quantization)
    x = noise(40, 64, seed=1)
    together = product(x)
    alone = torch.cat([product(x[t : t + 1]) for t in range(40)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)


def test_views_of_wider_tensors_are_multiplied_as_copies_would_be(kernels: str) -> None:
    wide = noise(6, 128)
    for quantization in KINDS:
        product = make_linear_product(noise(16, 64), None, None, quantization)
        torch.testing.assert_close(product(wide[:, 64:]), product(wide[:, 64:].clone()))


def test_weights_take_a_quarter_of_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_packed_products", lambda *_: False)
    product = make_linear_product(noise(64, 64), None, None, Quantization.INT8_WEIGHT_ONLY)
    assert isinstance(product, WeightOnlyProduct)
    assert product.codes.dtype == torch.int8
    assert product.codes.abs().max() == 127
    assert quantize(torch.zeros(2, 4)).scales.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("shape", ["llama-gqa-untied-32", "gpt2-untied-64", "opt-post-norm-projected-64"])
@pytest.mark.parametrize(
    ("quantization", "rounding", "of_torch"),
    [
        (Quantization.INT8_WEIGHT_ONLY, Rounding.WEIGHT, WeightOnlyProduct),
        (Quantization.INT8_DYNAMIC, Rounding.WEIGHT_AND_INPUT, DynamicProduct),
    ],
)
def test_all_linear_layers_but_the_head_hold_int8(
    tmp_path: Path, shape: str, quantization: Quantization, rounding: Rounding, of_torch: type, kernels: str
) -> None:
    make_shape(tmp_path, shape)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, quantization=quantization)
    linears = {name: module._product for name, module in model.named_modules() if isinstance(module, Linear)}
    assert len(linears) > 6
    for name, product in linears.items():
        if kernels == "torch":
            assert isinstance(product, of_torch) is (name != "head"), name
        else:
            assert isinstance(product, OwnProduct), name
            assert product.weight.rounding is (Rounding.NONE if name == "head" else rounding), name


def test_a_model_of_transformers_code_is_refused(tmp_path: Path) -> None:
    make_shape(tmp_path, "llama-gqa-untied-32")
    with pytest.raises(ConfigurationError, match="--quantization is int8-dynamic and must be none"):
        load_model(
            tmp_path,
            device=torch.device("cpu"),
            dtype=torch.float32,
            model_impl="transformers",
            quantization=Quantization.INT8_DYNAMIC,
        )


def test_dynamic_is_refused_where_the_device_is_no_cpu(tmp_path: Path) -> None:
    make_shape(tmp_path, "llama-gqa-untied-32")
    with pytest.raises(ConfigurationError, match="int8-dynamic, which is for cpu, and the device is cuda"):
        load_model(tmp_path, device=torch.device("cuda"), dtype=torch.float32, quantization=Quantization.INT8_DYNAMIC)
