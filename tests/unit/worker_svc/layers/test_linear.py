"""Linear layers: products of packed and of int8 weights compared with plain ones, and each rank's part."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.low_rank import LowRank
from quire_kernels.packed_weight import Quantization
from tests.support.models import make_model
from worker_svc.layers import products
from worker_svc.layers.activations import ACTIVATIONS, ActivationKind
from worker_svc.layers.adapted_products import TokenSlots
from worker_svc.layers.embedding_norm import Embedding
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.products import (
    OwnProduct,
    PackedProduct,
    PlainProduct,
    WeightOnlyProduct,
    make_product,
    pays_to_pack,
)
from worker_svc.models.registry import load_model
from worker_svc.parallel.ranks import Ranks, Segment
from worker_svc.weights import Checkpoint, Loadable, Placement

PLAIN = [ActivationKind(name) for name in ACTIVATIONS]
# oneDNN packs bfloat16 only on processors with AVX-512 or with conversions of bfloat16.
PACKED_DTYPES = [torch.float32, *([torch.bfloat16] if pays_to_pack(torch.zeros((1, 1), dtype=torch.bfloat16)) else [])]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture
def no_kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products.ops, "has_packed_products", lambda *_: False)


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


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (96, 64), (257, 130), (512, 768)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_packed_product_equals_the_plain_one(
    out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = make_weights(out_features, in_features, dtype)
    for count in (0, 1, 3, 16, 65):
        assert_as_plain(weight, bias if has_bias else None, None, make_tokens(count, in_features, dtype))


@pytest.mark.parametrize("dtype", PACKED_DTYPES)
@pytest.mark.parametrize("kind", PLAIN, ids=str)
def test_every_activation_of_a_packed_product_equals_torchs(kind: ActivationKind, dtype: torch.dtype) -> None:
    weight, bias = make_weights(48, 40, dtype)
    assert_as_plain(weight, bias, kind, 4 * make_tokens(5, 40, dtype))


def test_weights_go_to_our_own_kernel_else_large_ones_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(make_product(torch.zeros((64, 64), dtype=dtype)), OwnProduct)
    monkeypatch.setattr(products.ops, "has_packed_products", lambda *_: False)
    assert isinstance(make_product(torch.zeros(64, 64)), PlainProduct)
    assert isinstance(make_product(torch.zeros(512, 512)), PackedProduct)


def test_without_onednn_products_are_plain(no_kernels_of_our_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, bias = make_weights(512, 512, torch.float32)
    tokens = make_tokens(3, 512, torch.float32)
    plain = make_product(weight, bias, ActivationKind("relu"))
    assert isinstance(plain, PlainProduct)
    assert torch.equal(plain(tokens), torch.relu(torch.nn.functional.linear(tokens, weight, bias)))


KINDS_AND_KERNELS = pytest.mark.parametrize(
    ("quantization", "kernels"),
    [
        (Quantization.INT8_WEIGHT_ONLY, "own kernels"),
        (Quantization.INT8_WEIGHT_ONLY, "torch"),
        (Quantization.INT8_DYNAMIC, "own kernels"),
    ],
    indirect=["kernels"],
)
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(ops, "has_packed_products", lambda *_: False)
    return request.param


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bound(weight: torch.Tensor, x: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """The maximum rounding error of each output: half a scale of every weight, and of every input."""
    weight, x = weight.double(), x.double()
    weight_scale = weight.abs().amax(1, keepdim=True) / 127
    error = x.abs() @ torch.full_like(weight, 0.51).mul(weight_scale).T
    if quantization is Quantization.INT8_DYNAMIC:
        input_error = torch.full_like(x, 0.51) * x.abs().amax(1, keepdim=True) / 127
        error += input_error @ (weight.abs() + weight_scale).T
    return error


@KINDS_AND_KERNELS
@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (7, 33), (33, 24), (257, 130), (64, 768)])
def test_int8_weights_err_no_more_than_rounding_allows(
    quantization: Quantization, dtype: torch.dtype, out_features: int, in_features: int, kernels: str
) -> None:
    weight = (noise(out_features, in_features) * in_features**-0.5).to(dtype)
    bias = noise(out_features, seed=2).to(dtype)
    product = make_product(weight, bias, None, quantization)
    x = noise(0, in_features).to(dtype)
    for tokens in (0, 1, 8, 9, 40):
        x = noise(tokens, in_features, seed=1).to(dtype)
        got = product(x)
        exact = x.double() @ weight.double().T + bias.double()
        assert got.dtype == dtype
        assert got.shape == (tokens, out_features)
        allowed = bound(weight, x, quantization) + ROUNDING[dtype] * (1 + exact.abs() * 2)
        assert ((got.double() - exact).abs() <= allowed).all(), tokens
    assert product(noise(2, 3, in_features).to(dtype)).shape == (2, 3, out_features)
    activated = make_product(weight, bias, ActivationKind("relu"), quantization)(x)
    torch.testing.assert_close(activated, torch.relu(product(x)))


@KINDS_AND_KERNELS
@pytest.mark.parametrize("tokens", [2, 20])
def test_zero_outliers_and_numbers_that_are_not_finite(quantization: Quantization, tokens: int, kernels: str) -> None:
    weight, x = noise(16, 32), noise(tokens, 32, seed=1)
    weight[3] = 0
    weight[5] *= 1e30
    x[0] = 0
    x[1, 7] = float("nan")
    got = make_product(weight, None, None, quantization)(x)
    assert (got[0] == 0).all()
    assert not got[1, [0, 1, 5]].isfinite().any()
    assert got[2:].isfinite().all()
    assert (got[2:, 3] == 0).all()


@pytest.mark.parametrize("shape", ["llama-gqa-untied-32", "gpt2-untied-64", "opt-post-norm-projected-64"])
@KINDS_AND_KERNELS
def test_all_linear_layers_but_the_head_hold_int8(
    tmp_path: Path, shape: str, quantization: Quantization, kernels: str
) -> None:
    make_model(tmp_path, shape)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, quantization=quantization)
    linears = {name: module._product for name, module in model.named_modules() if isinstance(module, Linear)}
    assert len(linears) > 6
    for name, product in linears.items():
        if kernels == "torch":
            assert isinstance(product, WeightOnlyProduct) is (name != "head"), name
        else:
            assert isinstance(product, OwnProduct), name
            is_dynamic = quantization is Quantization.INT8_DYNAMIC
            quantization = Quantization.INT8_DYNAMIC if is_dynamic else Quantization.INT8_WEIGHT_ONLY
            assert product.weight.quantization is (Quantization.NONE if name == "head" else quantization), name


@pytest.mark.parametrize(
    ("model_impl", "device", "kernels", "message"),
    [
        ("transformers", "cpu", "own kernels", "--quantization is int8-dynamic and must be none"),
        ("auto", "cuda", "own kernels", "int8-dynamic, which is for cpu, and the device is cuda"),
        ("auto", "cpu", "torch", "int8-dynamic, which needs the CPU library, and that was not built"),
    ],
    indirect=["kernels"],
)
def test_where_there_is_no_product_of_int8_it_is_refused(
    tmp_path: Path, model_impl: str, device: str, kernels: str, message: str
) -> None:
    make_model(tmp_path, "llama-gqa-untied-32")
    as_asked = {"device": torch.device(device), "dtype": torch.float32, "model_impl": model_impl}
    with pytest.raises(ConfigurationError, match=message):
        load_model(tmp_path, **as_asked, quantization=Quantization.INT8_DYNAMIC)


IN, OUT = 7, 9
X = torch.randn(5, IN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "a.weight": torch.randn(OUT, IN, generator=generator),
        "a.bias": torch.randn(OUT, generator=generator),
        "conv.weight": torch.randn(IN, 3 * 4, generator=generator),
        "conv.bias": torch.randn(3 * 4, generator=generator),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path, base_prefix="")


def placed(rank: int, size: int) -> Placement:
    """Ranks that do not communicate: values to sum or gather stay as they are."""
    return Placement(torch.device("cpu"), torch.float32, Ranks(rank, size))


def loaded(layer: Loadable, checkpoint: Checkpoint) -> Loadable:
    layer.load(checkpoint)
    return layer


def make_layer(checkpoint: Checkpoint, placement: Placement, split: Split = Split.WHOLE) -> Linear:
    layer = Linear([LinearPart("a", OUT)], IN, bias=True, placement=placement, split=split)
    layer.load(checkpoint)
    return layer


def whole(checkpoint: Checkpoint) -> torch.Tensor:
    return make_layer(checkpoint, placed(0, 1))(X)


@pytest.mark.parametrize("size", [2, 3])
def test_outputs_side_by_side_are_the_whole_layer_s(checkpoint: Checkpoint, size: int) -> None:
    parts = [make_layer(checkpoint, placed(rank, size), Split.OUTPUTS) for rank in range(size)]
    torch.testing.assert_close(torch.cat([part(X) for part in parts], dim=1), whole(checkpoint))


@pytest.mark.parametrize("size", [2, 3])
def test_sums_over_inputs_add_up_to_the_whole_layer_s_with_one_bias(checkpoint: Checkpoint, size: int) -> None:
    total = torch.zeros(len(X), OUT)
    for rank in range(size):
        part = make_layer(checkpoint, placed(rank, size), Split.INPUTS)
        total += part(X[:, Ranks(rank, size).shard(IN).slice])
    torch.testing.assert_close(total, whole(checkpoint))


def test_segments_are_split_each_by_itself(checkpoint: Checkpoint) -> None:
    part = LinearPart("conv", 12, segments=(Segment(4),) * 3)
    full = loaded(Linear([part], IN, bias=True, placement=placed(0, 1), input_major=True), checkpoint)(X)
    for rank in range(2):
        layer = Linear([part], IN, bias=True, placement=placed(rank, 2), split=Split.OUTPUTS, input_major=True)
        expected = full.view(len(X), 3, 2, 2)[:, :, rank].reshape(len(X), 6)
        torch.testing.assert_close(loaded(layer, checkpoint)(X), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vectors_of_an_embedding_come_from_the_rank_that_has_them(checkpoint: Checkpoint, size: int) -> None:
    ids = torch.arange(OUT)
    total = torch.zeros(OUT, IN)
    for rank in range(size):
        total += loaded(Embedding("a", OUT, IN, placement=placed(rank, size), split=True), checkpoint)(ids)
    torch.testing.assert_close(total, checkpoint.read(next(Embedding("a", OUT, IN, placement=placed(0, 1)).tensors())))


@pytest.mark.parametrize("split", [Split.OUTPUTS, Split.INPUTS])
def test_ranks_share_an_adapter_as_they_share_the_layer(split: Split, checkpoint: Checkpoint) -> None:
    size, generator = 2, torch.Generator().manual_seed(3)
    adapters = [
        LowRank(torch.randn(6, IN, generator=generator), torch.randn(OUT, 6, generator=generator), 0.5) for _ in "ab"
    ]
    slots = torch.arange(len(X)) % 3

    def adapted(placement: Placement) -> torch.Tensor:
        layer = make_layer(checkpoint, placement, split)
        token_slots = TokenSlots()
        layer.accept_adapters(token_slots, 2, 6)
        for slot, adapter in enumerate(adapters, 1):
            layer.adapters.put(slot, layer.adapters.pack(layer.of_rank([adapter])))
        inputs = placement.ranks.shard(IN).slice if split is Split.INPUTS else slice(None)
        with token_slots.used(slots):
            return layer(X[:, inputs])

    parts = [adapted(placed(rank, size)) for rank in range(size)]
    together = torch.cat(parts, dim=1) if split is Split.OUTPUTS else parts[0] + parts[1]
    torch.testing.assert_close(together, adapted(placed(0, 1)))
    deltas = torch.stack([torch.zeros(len(X), OUT), *(each.scale * X @ each.a.t() @ each.b.t() for each in adapters)])
    expected = whole(checkpoint) + deltas[slots, torch.arange(len(X))]
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)
