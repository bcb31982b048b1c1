"""Quantized weights of safetensors files equal the format's reference, and so do products, bit for bit."""

import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import CodedWeight, Coding, Quantization
from tests.support.models import Family, edit_config, edit_tensors, make_model
from tests.support.paged import PagedRunner, Span, codings_in_use, codings_of
from tests.support.parity import assert_serves_like
from tests.support.quantized_files import Quantize, Tensors, awq, compressed, fp8, gptq, quantize_model
from tests.support.tiers import parametrize_in_turn
from worker_svc.layers.linear import Linear
from worker_svc.models.registry import load_model
from worker_svc.quantized_weights import with_quantized_weights
from worker_svc.weights import Checkpoint, TensorSpec

CPU = torch.device("cpu")
LLAMA = Family("Llama", {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32})
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}


def compressed_format(
    form: str, dtype: torch.dtype = torch.bfloat16, inputs: dict[str, Any] | None = None, **args: Any
) -> tuple[Quantize, dict[str, Any]]:
    args = {"num_bits": 8, "type": "int", "symmetric": True, **args}
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return partial(compressed, args=args, form=form, dtype=dtype), config


DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "awq": (awq, AWQ),
    "awq-128": (partial(awq, group=128), AWQ | {"group_size": 128}),
    # AutoRound 0.16.1 writes this by default.
    "awq-symmetric": (partial(awq, symmetric=True), AWQ | {"zero_point": False, "sym": True}),
    "gptq": (gptq, GPTQ),
    "gptq-sym": (partial(gptq, symmetric=True), GPTQ | {"sym": True}),
    "gptq-8-bits": (partial(gptq, bits=8), GPTQ | {"bits": 8}),
    "gptq-v2": (partial(gptq, is_v2=True), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "gptq-32": (partial(gptq, group=32), GPTQ | {"group_size": 32}),
    "pack-4-group": compressed_format("pack-quantized", num_bits=4, strategy="group", group_size=64),
    "pack-4-zeros": compressed_format("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    "pack-4-channel": compressed_format("pack-quantized", num_bits=4, strategy="channel"),
    "pack-8-group": compressed_format("pack-quantized", strategy="group", group_size=128),
    "pack-8-zeros": compressed_format("pack-quantized", strategy="channel", symmetric=False),
    "int-channel": compressed_format("int-quantized", strategy="channel", inputs=DYNAMIC | {"type": "int"}),
    "int-zeros": compressed_format("int-quantized", strategy="channel", symmetric=False),
    "int-4-bits": compressed_format("int-quantized", num_bits=4, strategy="channel", symmetric=False),
    "int-tensor": compressed_format("int-quantized", strategy="tensor"),
    "float-channel": compressed_format("float-quantized", type="float", strategy="channel", inputs=DYNAMIC),
    "float-tensor": compressed_format("float-quantized", type="float", strategy="tensor"),
    "float-tensor-float32": compressed_format("float-quantized", torch.float32, type="float", strategy="tensor"),
    "float-block": compressed_format("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
    "block-as-text": compressed_format("float-quantized", type="float", strategy="block", block_structure="128x128"),
    "fp8-tensor": (partial(fp8, block=(512, 512), dtype=torch.float32), FP8),
    "fp8-block": (partial(fp8, dtype=torch.float32), FP8 | {"weight_block_size": [128, 128]}),
    "fp8-block-bfloat16": (partial(fp8, block=(64, 96), dtype=torch.bfloat16), FP8 | {"weight_block_size": [64, 96]}),
}
IN_MIXED_ORDER = (partial(gptq, in_order=False), GPTQ | {"desc_act": True})


def make(directory: Path, name: str, **fields: Any) -> Tensors:
    make_model(directory, LLAMA, **fields)
    quantize, config = IN_MIXED_ORDER if name == "gptq-in-mixed-order" else FORMATS[name]
    return quantize_model(directory, quantize, **config)


def open_checkpoint(directory: Path) -> Checkpoint:
    return with_quantized_weights(Checkpoint.open(directory, base_prefix="model."), ModelDirectory.open(directory))


@pytest.mark.parametrize("name", [*FORMATS, "gptq-in-mixed-order"])
def test_weights_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    """Weights in bfloat16. If scales are float16, the reference here is the exact product."""
    expected = make(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    assert len(expected) == 14
    for weight, numbers in expected.items():
        spec = TensorSpec(weight, tuple(numbers.shape))
        checkpoint.check([spec])
        read = checkpoint.read(spec)
        assert torch.equal(read.bfloat16(), numbers.bfloat16()), weight
        coded = checkpoint.coded(spec)
        assert (coded is None) == (name == "gptq-in-mixed-order")
        assert coded is None or torch.equal(coded.dequantized(), read)
        assert checkpoint.num_bytes(spec) < 2 * numbers.numel()
    assert not any(name.endswith(("qzeros", "scale", "weight_packed")) for name in checkpoint.tensors)


@pytest.mark.parametrize(
    "targets", [["re:.*down_proj$"], [f"model.layers.{index}.mlp.down_proj" for index in range(2)]]
)
def test_of_several_groups_a_module_is_in_the_one_that_names_it_as_compressed_tensors_has_it(
    tmp_path: Path, targets: list[str]
) -> None:
    """Names come before expressions, and expressions before all linear layers, each in alphabetical order."""
    (four, config), (eight, other) = (
        compressed_format("pack-quantized", num_bits=bits, strategy="group", group_size=32) for bits in (4, 8)
    )
    groups = [each["config_groups"]["group_0"] for each in (config, config, other)]
    named = zip(groups, (["Linear"], ["re:.*mlp.*"], targets), strict=True)
    config["config_groups"] = {f"group_{index}": {**group, "targets": of} for index, (group, of) in enumerate(named)}
    make_model(tmp_path, LLAMA)
    expected = quantize_model(tmp_path, lambda *shape: (eight if shape[1] == 512 else four)(*shape), **config)
    checkpoint = open_checkpoint(tmp_path)
    for weight, numbers in expected.items():
        assert torch.equal(checkpoint.read(TensorSpec(weight, tuple(numbers.shape))).bfloat16(), numbers.bfloat16())


@parametrize_in_turn("name, num_ranks", FORMATS, [(2,), (1,)])
def test_weights_are_multiplied_as_the_file_has_them(
    tmp_path: Path, name: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits, too, are logits of the dequantized weights, bit for bit."""
    make(tmp_path, name)
    codings = codings_in_use(tmp_path, num_ranks, monkeypatch)
    # The output layer has no codes, and blocks of FP8 may end within the inputs of a rank.
    assert None in codings[True]
    assert len(codings[True]) > 1
    assert codings[False] == {None}


def test_in_float16_weights_are_those_of_awq_and_gptq_themselves(tmp_path: Path) -> None:
    """Both multiply codes by scales in float16."""
    expected = make(tmp_path, "gptq")
    checkpoint = open_checkpoint(tmp_path)
    for weight, numbers in expected.items():
        assert torch.equal(checkpoint.read(TensorSpec(weight, tuple(numbers.shape))).half(), numbers.half())


def test_int8_dynamic_rounds_only_what_codes_are_multiplied_with(tmp_path: Path) -> None:
    make(tmp_path, "awq")
    model = load_model(tmp_path, device=CPU, dtype=torch.bfloat16, quantization=Quantization.INT8_DYNAMIC)
    codings = {coding for layer in model.modules() if isinstance(layer, Linear) for coding in codings_of(layer)}
    assert Coding.INT4 in codings


def test_int8_dynamic_is_refused_with_fp8(tmp_path: Path) -> None:
    make(tmp_path, "fp8-block")
    with pytest.raises(ConfigurationError, match="weights are in FP8, which have no products with int8"):
        load_model(tmp_path, device=CPU, dtype=torch.bfloat16, quantization=Quantization.INT8_DYNAMIC)


def test_the_log_says_that_inputs_are_not_rounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "float-channel")
    with caplog.at_level(logging.WARNING):
        open_checkpoint(tmp_path)
    assert "inputs of layers are not rounded to 8 bits (float), only their weights are" in caplog.text
    caplog.clear()
    with_quantized_weights(
        Checkpoint.open(tmp_path, base_prefix=""), ModelDirectory.open(tmp_path), has_fp8_products=True
    )
    assert not caplog.text


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("float-channel", True),
        ("fp8-tensor", True),
        ("float-tensor", False),
        ("fp8-block", False),
        ("int-channel", False),
    ],
)
def test_weights_know_whether_products_may_round_their_inputs(tmp_path: Path, name: str, rounds: bool) -> None:
    """Products may round inputs to FP8 if the format does so with a scale for each token."""
    expected = make(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    for weight, numbers in expected.items():
        coded = checkpoint.coded(TensorSpec(weight, tuple(numbers.shape)))
        assert coded is not None
        part = coded.part(slice(0, 16), slice(0, 128))
        assert part is not None
        assert [each.rounds_inputs for each in (coded, part, CodedWeight.joined([part, part]))] == [rounds] * 3


def test_ignored_modules_of_compressed_tensors_are_not_the_modules_within_them(tmp_path: Path) -> None:
    expected = make(tmp_path, "pack-4-group")
    ignored = {"ignore": ["model.layers.0.mlp", "proj"]}
    edit_config(tmp_path, quantization_config=FORMATS["pack-4-group"][1] | ignored)
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    read = checkpoint.read(TensorSpec(name, tuple(expected[name].shape)))
    assert torch.equal(read.bfloat16(), expected[name].bfloat16())


def test_a_model_through_transformers_has_the_dequantized_weights(tmp_path: Path) -> None:
    expected = make(tmp_path / "quantized", "gptq")
    make_model(tmp_path / "plain", LLAMA)
    edit_tensors(tmp_path / "plain", lambda tensors: tensors | expected)
    tokens = [3 + 7 * index % 300 for index in range(20)]
    found = [
        PagedRunner(
            load_model(tmp_path / name, device=CPU, dtype=torch.float32, model_impl="transformers"),
            [tokens],
            block_size=4,
        ).step(Span(0, 0, 20))
        for name in ("quantized", "plain")
    ]
    assert torch.equal(*found)


def test_zeros_in_bytes_are_read_as_older_releases_wrote_them(tmp_path: Path) -> None:
    expected = make(tmp_path, "pack-4-zeros")
    name = "model.layers.0.mlp.up_proj"
    stored = load_file(tmp_path / "model.safetensors")[f"{name}.weight_zero_point"]
    words = stored.t().contiguous().view(torch.uint8)
    zeros = torch.stack((words & 15, words >> 4), -1).flatten(1).t().to(torch.int8) - 8
    set_tensor(tmp_path, f"{name}.weight_zero_point", zeros.contiguous())
    numbers = expected[f"{name}.weight"]
    assert torch.equal(
        open_checkpoint(tmp_path).read(TensorSpec(f"{name}.weight", tuple(numbers.shape))).bfloat16(),
        numbers.bfloat16(),
    )
    set_tensor(tmp_path, f"{name}.weight_zero_point", zeros.contiguous().fill_(8))
    with pytest.raises(ConfigurationError, match=r"weight_zero_point has 8; expected -8 to 7"):
        load_model(tmp_path, device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "file"),
    [("gptq", "quantize_config.json"), ("awq", "quant_config.json"), ("pack-4-group", "compression_config")],
)
def test_what_older_tools_wrote_elsewhere_is_the_quantization_config(tmp_path: Path, name: str, file: str) -> None:
    expected = make(tmp_path, name)
    fields = {"quantization_status": "frozen"} if name == "pack-4-group" else {}
    moved: dict[str, Any] = FORMATS[name][1] | fields
    if name != "pack-4-group":
        (tmp_path / file).write_text(json.dumps({key: moved[key] for key in moved if key != "quant_method"}))
    edit_config(tmp_path, quantization_config=None, **{file: moved} if name == "pack-4-group" else {})
    assert_served_as(tmp_path, expected)


@pytest.mark.parametrize("fields", [{}, {"quantization_config": {"bits": 4}}])
def test_weights_of_mlx_are_refused_by_name(tmp_path: Path, fields: dict[str, Any]) -> None:
    make_model(tmp_path, LLAMA)
    edit_config(tmp_path, quantization={"bits": 4}, **fields)
    with pytest.raises(ConfigurationError, match=r"quant_method is 'mlx'; weights of MLX are not read, take the model"):
        load_model(tmp_path, device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_fp8_of_autofp8_has_one_scale_by_another_name(tmp_path: Path, shape: tuple[int, ...]) -> None:
    def quantize(out_features: int, in_features: int, seed: int) -> tuple[Tensors, torch.Tensor]:
        block = (out_features, in_features)
        tensors, numbers = fp8(out_features, in_features, seed, block=block, dtype=torch.float32)
        scale = tensors.pop("weight_scale_inv").view(shape)
        return tensors | {"weight_scale": scale, "input_scale": torch.ones(shape)}, numbers

    make_model(tmp_path, LLAMA)
    assert_served_as(tmp_path, quantize_model(tmp_path, quantize, **FP8 | {"activation_scheme": "static"}))


def assert_served_as(directory: Path, expected: Tensors) -> None:
    load_model(directory, device=CPU, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(directory)
    for weight, numbers in expected.items():
        assert torch.equal(checkpoint.read(TensorSpec(weight, tuple(numbers.shape))).bfloat16(), numbers.bfloat16())


def set_tensor(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    def change(tensors: Tensors) -> Tensors:
        rest = {key: value for key, value in tensors.items() if key != name}
        return rest if tensor is None else rest | {name: tensor}

    edit_tensors(directory, change)


PROJECTION = "model.layers.1.mlp.down_proj"
SCALES = torch.ones(8, 256, dtype=torch.float16)


@pytest.mark.parametrize(
    ("name", "kind", "tensor", "message"),
    [
        ("awq", "scales", None, f"tensor {PROJECTION}.scales is missing from the safetensors files"),
        ("gptq", "qzeros", None, f"tensor {PROJECTION}.qzeros is missing"),
        ("awq-symmetric", "qzeros", None, f"tensor {PROJECTION}.qzeros is missing from the safetensors files"),
        ("awq", "scales", SCALES[:7], "scales has shape [7, 256]; expected [8, 256]"),
        ("awq", "scales", SCALES.long(), "scales has dtype I64; expected F32, BF16, F16"),
        ("awq", "qweight", torch.zeros(512, 32), "qweight has dtype F32; expected I32"),
        ("gptq", "qzeros", torch.zeros(4, 32, dtype=torch.int32), "qzeros has shape [4, 32]; expected [8, 32]"),
        ("gptq", "g_idx", torch.full((512,), 8, dtype=torch.int32), "g_idx has 8; expected groups 0 to 7"),
        ("gptq", "g_idx", torch.full((512,), -1, dtype=torch.int32), "g_idx has -1; expected groups 0 to 7"),
        ("gptq", "g_idx", torch.zeros(5, dtype=torch.int32), "g_idx has shape [5]; expected [512]"),
        ("gptq-in-mixed-order", "g_idx", None, f"tensor {PROJECTION}.g_idx is missing"),
        ("pack-4-group", "weight_shape", torch.tensor([256, 4]), "has weight_shape [256, 4], and weight_packed has"),
        ("pack-4-group", "weight_scale", None, f"tensor {PROJECTION}.weight_scale is missing"),
        ("pack-4-zeros", "weight_zero_point", None, f"tensor {PROJECTION}.weight_zero_point is missing"),
        (
            "int-tensor",
            "weight",
            torch.zeros(0, 0, dtype=torch.int8),
            "weight has shape [0, 0]; expected ['any', 'any']",
        ),
        ("float-channel", "weight_scale", torch.ones(3, 1), "weight_scale has shape [3, 1]; expected [256, 1]"),
        ("float-tensor", "weight_scale", torch.ones(3), "has shape [3]; expected [1, 1] or [1] or []"),
        ("fp8-block", "weight", torch.full((256, 512), 255, dtype=torch.uint8).view(torch.float8_e4m3fn), "has NaN"),
        ("fp8-block", "weight_scale_inv", torch.ones(2, 3), "weight_scale_inv has shape [2, 3]; expected [2, 4]"),
    ],
)
def test_files_that_contradict_the_configuration_are_refused(
    tmp_path: Path, name: str, kind: str, tensor: torch.Tensor | None, message: str
) -> None:
    make(tmp_path, name)
    set_tensor(tmp_path, f"{PROJECTION}.{kind}", tensor)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("awq", {"quant_method": "aqlm"}, "quant_method is 'aqlm'; supported: awq, gptq, compressed-tensors"),
        ("awq", {"quant_method": None}, "quant_method is None; supported: awq"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; supported: gemm"),
        ("awq", {"bits": 8}, "bits is 8; supported: 4"),
        ("awq", {"group_size": 48}, "group_size is 48; expected -1 or a divisor of "),
        ("awq", {"group_size": 0}, "group_size is 0; expected -1 or a divisor"),
        (
            "awq",
            {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp"]},
            "is quantized, but quantization_config says that it is not",
        ),
        ("gptq", {"bits": 3}, "bits is 3; supported: 4, 8"),
        ("gptq", {"bits": True}, "bits is True; supported: 4, 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
        ("gptq", {"dynamic": {"+:.*mlp.*": {"bits": 8}}}, "all modules must have the same bits and groups"),
        ("pack-4-group", {"format": "mxfp6-pack-quantized"}, "format is 'mxfp6-pack-quantized'; supported: pack-qua"),
        ("pack-4-group", {"quantization_status": "calibration"}, "quantization_status is 'calibration'; supported: co"),
        (
            "pack-4-group",
            {"config_groups": {}},
            "is quantized, but is in no group of quantization_config.config_groups",
        ),
        ("pack-4-group", {"config_groups": [1]}, "config_groups is [1]; expected an object"),
        (
            "pack-4-group",
            {
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"num_bits": 4, "strategy": "group", "group_size": 64, "actorder": "group"},
                    }
                }
            },
            "weight_g_idx is missing from the safetensors files",
        ),
        ("pack-4-group", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not read"),
        ("pack-4-group", {"transform_config": {"config_groups": {"R1": {}}}}, "rotated weights are not read"),
        ("pack-4-group", {"ignore": ["re:.*self_attn.*"]}, "is quantized, but quantization_config says that"),
        (
            "pack-4-group",
            {"ignore": ["model.layers.0.mlp.up_proj"]},
            "mlp.up_proj is quantized, but ",
        ),
        ("pack-4-group", {"ignore": "lm_head"}, "ignore is 'lm_head'; expected a list of names"),
        ("pack-4-group", {"ignore": ["re:("]}, "ignore is '('; this is no regular expression"),
        ("fp8-block", {"weight_block_size": [128]}, "weight_block_size is [128]; expected the outputs and the inputs"),
    ],
)
def test_configurations_that_are_not_read_are_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    make(tmp_path, name)
    edit_config(tmp_path, quantization_config=FORMATS[name][1] | fields)
    assert_refused(tmp_path, message)


def assert_refused(directory: Path, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        load_model(directory, device=CPU, dtype=torch.bfloat16)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_mxfp4_are_served_as_they_are_dequantized(tmp_path: Path, dtype: torch.dtype) -> None:
    """As GPT-OSS is published."""
    reference = make_model(tmp_path, "gpt-oss-moe")
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    generator = torch.Generator().manual_seed(7)
    parameters = dict(reference.named_parameters())

    def coded(tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, inputs, outputs = found.pop(name).shape
            codes = torch.randint(0, 16, (experts, outputs, inputs), generator=generator)
            exponents = torch.randint(120, 124, (experts, outputs, inputs // 32), generator=generator)
            octets = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
            found[f"{name}_blocks"] = octets.unflatten(-1, (-1, 16)).contiguous()
            found[f"{name}_scales"] = exponents.to(torch.uint8)
            scales = torch.ldexp(torch.ones(exponents.shape), exponents - 127).repeat_interleave(32, -1)
            with torch.no_grad():
                parameters[name].copy_((numbers[codes] * scales).transpose(1, 2))
        return found

    edit_tensors(tmp_path, coded)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    model = load_model(tmp_path, device=CPU, dtype=dtype)
    if dtype == torch.float32:
        assert_serves_like(reference, model)
        return
    tokens = list(range(3, 40))
    found = PagedRunner(model, [tokens], block_size=4).step(Span(0, 0, 37))
    reference.save_pretrained(tmp_path / "plain")
    plain = load_model(tmp_path / "plain", device=CPU, dtype=dtype)
    assert torch.equal(found, PagedRunner(plain, [tokens], block_size=4).step(Span(0, 0, 37)))
