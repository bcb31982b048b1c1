"""Weights that packages quantized have the numbers of those packages, and keep their codes if products take them."""

import json
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from quire_kernels.packed_weight import Coding
from tests.support.models import Family, edit_config, edit_tensors, make_model
from tests.support.package_files import (
    as_bytes,
    bitsandbytes_4_bits,
    bitsandbytes_8_bits,
    describe_for_torchao,
    hqq,
    modelopt_fp8,
    mxfp4,
    nvfp4,
    torchao_int4,
    torchao_octets,
)
from tests.support.paged import PagedRunner, Span, codings_in_use
from tests.support.quantized_files import Quantize, Tensors, awq, gptq, quantize_model
from tests.support.tiers import parametrize_in_turn
from worker_svc import pool_setup, startup
from worker_svc.models.registry import load_model
from worker_svc.quantized_weights import read_quantized_weights
from worker_svc.settings import WorkerSettings
from worker_svc.weights import Checkpoint, TensorSpec

CPU = torch.device("cpu")
PROJECTION = "model.layers.1.mlp.down_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"
LLAMA = Family("Llama", {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32})
BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "data_type": "int", "sym": False}
TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"], "producer": {"name": "modelopt"}}
HQQ = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}


def compressed_fp4(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "symmetric": True, **weights}}
    config = {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"}
    return config | {"ignore": ["lm_head"], "config_groups": {"group_0": group}}


NVFP4 = compressed_fp4("nvfp4-pack-quantized", strategy="tensor_group", group_size=16)
MXFP4 = compressed_fp4("mxfp4-pack-quantized", strategy="group", group_size=32)

FORMATS: dict[str, tuple[Quantize, dict[str, Any], Coding | None]] = {
    "bitsandbytes-nf4": (bitsandbytes_4_bits, BITSANDBYTES, Coding.TABLE4),
    "bitsandbytes-nf4-nested": (partial(bitsandbytes_4_bits, nested=True), BITSANDBYTES, Coding.TABLE4),
    "bitsandbytes-nf4-as-bfloat16": (partial(bitsandbytes_4_bits, storage=torch.bfloat16), BITSANDBYTES, Coding.TABLE4),
    "bitsandbytes-fp4": (partial(bitsandbytes_4_bits, kind="fp4"), BITSANDBYTES, Coding.TABLE4),
    "bitsandbytes-int8": (bitsandbytes_8_bits, BITSANDBYTES | {"load_in_8bit": True}, Coding.INT8),
    "modelopt-fp8": (modelopt_fp8, MODELOPT | {"quant_algo": "FP8"}, Coding.FP8),
    "modelopt-nvfp4": (nvfp4, MODELOPT | {"quant_algo": "NVFP4"}, Coding.NVFP4),
    "compressed-nvfp4": (partial(nvfp4, divides=True), NVFP4, Coding.NVFP4),
    "compressed-mxfp4": (mxfp4, MXFP4, Coding.MXFP4),
    "auto-round-gptq": (gptq, AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, Coding.INT4),
    "auto-round-awq": (awq, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, Coding.INT4),
    "hqq-4": (hqq, HQQ, None),
    "hqq-4-axis-0": (partial(hqq, axis=0), HQQ, None),
    "hqq-3": (partial(hqq, bits=3), HQQ, None),
    "hqq-3-axis-0": (partial(hqq, bits=3, axis=0), HQQ, None),
    "hqq-8": (partial(hqq, bits=8, group=128), HQQ, None),
    "hqq-2": (partial(hqq, bits=2, group=16), HQQ, None),
    "torchao-int8": (torchao_octets, TORCHAO, Coding.INT8),
    "torchao-int8-group": (partial(torchao_octets, group=64, has_zeros=True), TORCHAO, Coding.INT8),
    "torchao-int4": (torchao_int4, TORCHAO, None),
}
TORCHAO_TYPES = {
    "torchao-int8": ("Int8Tensor", None),
    "torchao-int8-group": ("IntxUnpackedToInt8Tensor", 64),
    "torchao-int4": ("Int4Tensor", 64),
}


def make(directory: Path, name: str) -> Tensors:
    make_model(directory, LLAMA)
    quantize, config, _ = FORMATS[name]
    expected = quantize_model(directory, quantize, **config)
    if name in TORCHAO_TYPES:
        describe_for_torchao(directory, *TORCHAO_TYPES[name])
    return expected


def open_checkpoint(directory: Path) -> Checkpoint:
    return read_quantized_weights(Checkpoint.open(directory, base_prefix="model."), ModelDirectory.open(directory))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_have_the_numbers_that_the_package_computes(tmp_path: Path, name: str) -> None:
    expected = make(tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    assert len(expected) == 14
    for weight, numbers in expected.items():
        spec = TensorSpec(weight, tuple(numbers.shape))
        checkpoint.check([spec])
        read, coded = checkpoint.read(spec), checkpoint.coded(spec)
        torch.testing.assert_close(read, numbers, rtol=1e-6, atol=1e-9)
        assert (None if coded is None else coded.coding) == FORMATS[name][2]
        assert coded is None or torch.equal(coded.dequantized(), read)
        assert checkpoint.num_bytes(spec) < 2 * numbers.numel()


@parametrize_in_turn(
    "name, implementation",
    ["bitsandbytes-nf4", "bitsandbytes-int8", "modelopt-nvfp4", "hqq-4", "torchao-int4"],
    [("native",), ("transformers",)],
)
def test_a_model_computes_what_the_model_of_these_numbers_does(tmp_path: Path, name: str, implementation: str) -> None:
    expected = make(tmp_path / "quantized", name)
    make_model(tmp_path / "plain", LLAMA)
    edit_tensors(tmp_path / "plain", lambda tensors: tensors | expected)
    tokens = [3 + 7 * index % 300 for index in range(20)]
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "model_impl": implementation}
    models = [load_model(tmp_path / each, **options) for each in ("quantized", "plain")]
    found, wanted = (PagedRunner(model, [tokens], block_size=4).step(Span(0, 0, 20)) for model in models)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_weights_of_gpt_2_are_stored_with_the_outputs_first(tmp_path: Path) -> None:
    """Without codes they are [in, out]."""
    for name in ("plain", "quantized"):
        make_model(tmp_path / name, "gpt2-tied-32")
    numbers: Tensors = {}

    def quantize(tensors: Tensors) -> Tensors:
        changed: Tensors = {}
        for name, tensor in tensors.items():
            if not name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                changed[name] = tensor
                continue
            parts, weight = bitsandbytes_8_bits(*tensor.shape[::-1], seed=len(numbers))
            numbers[name] = weight.T.contiguous()
            changed |= {f"{name.removesuffix('weight')}{kind}": part for kind, part in parts.items()}
        return changed

    edit_tensors(tmp_path / "quantized", quantize)
    edit_config(tmp_path / "quantized", quantization_config=BITSANDBYTES | {"load_in_8bit": True})
    edit_tensors(tmp_path / "plain", lambda tensors: tensors | numbers)
    models = [load_model(tmp_path / each, device=CPU, dtype=torch.float32) for each in ("quantized", "plain")]
    found, wanted = (PagedRunner(model, [[7, 9, 8]], block_size=4).step(Span(0, 0, 3)) for model in models)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert len(numbers) == 8


@parametrize_in_turn("name, num_ranks", FORMATS, [(2,), (1,)])
def test_codes_of_whole_numbers_are_multiplied_as_the_file_has_them(
    tmp_path: Path, name: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are expanded."""
    make(tmp_path, name)
    assert codings_in_use(tmp_path, num_ranks, monkeypatch)[True] == {None, FORMATS[name][2]}


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("bitsandbytes-int8", "8 bits (int)"),
        ("modelopt-fp8", "FP8"),
        ("modelopt-nvfp4", "NVFP4"),
        ("bitsandbytes-nf4", None),
    ],
)
def test_the_log_says_that_inputs_are_not_rounded(
    tmp_path: Path, name: str, inputs: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, name)
    with caplog.at_level(logging.WARNING):
        load_model(tmp_path, device=CPU, dtype=torch.bfloat16)
    assert (f"inputs of layers are not rounded to {inputs}, only their weights are" in caplog.text) == (
        inputs is not None
    )


def test_a_block_may_be_said_to_be_larger_than_the_weight(tmp_path: Path) -> None:
    expected = make(tmp_path, "bitsandbytes-nf4")[f"{PROJECTION}.weight"]
    state = {"blocksize": 1 << 60, "shape": list(expected.shape)}

    def change(tensors: Tensors) -> Tensors:
        absmax = tensors[f"{PROJECTION}.weight.absmax"][:1].clone()
        return tensors | {f"{PROJECTION}.{STATE}": as_bytes(json.dumps(state)), f"{PROJECTION}.weight.absmax": absmax}

    edit_tensors(tmp_path, change)
    read = open_checkpoint(tmp_path).read(TensorSpec(f"{PROJECTION}.weight", tuple(expected.shape)))
    assert torch.equal(read.flatten()[:64], expected.flatten()[:64])


def test_modelopt_is_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    expected = make(tmp_path, "modelopt-nvfp4")
    edit_config(tmp_path, quantization_config=None)
    fields = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": fields}))
    checkpoint = open_checkpoint(tmp_path)
    for weight, numbers in expected.items():
        assert torch.equal(checkpoint.read(TensorSpec(weight, tuple(numbers.shape))), numbers)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": fields | {"quant_algo": "W4A8_AWQ"}}))
    assert_refused(tmp_path, "quant_algo is 'W4A8_AWQ'; supported: FP8, NVFP4")


def test_auto_round_may_have_modules_with_other_bits(tmp_path: Path) -> None:
    make_model(tmp_path, LLAMA)
    eight = partial(gptq, bits=8, group=32)
    others = {f"model.layers.{layer}.mlp.down_proj": {"bits": 8, "group_size": 32} for layer in range(2)}
    config = AUTO_ROUND | {"packing_format": "auto_round:auto_gptq", "extra_config": others}
    expected = quantize_model(tmp_path, lambda *shape: (eight if shape[1] == 512 else gptq)(*shape), **config)
    checkpoint = open_checkpoint(tmp_path)
    for weight, numbers in expected.items():
        assert torch.equal(checkpoint.read(TensorSpec(weight, tuple(numbers.shape))), numbers)


def test_the_log_says_what_memory_expanded_weights_take_and_more_than_there_is_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(tmp_path, "hqq-4")
    size = 2 * sum(numbers.numel() for numbers in expected.values())
    described, settings = ModelDirectory.open(tmp_path), WorkerSettings()
    monkeypatch.setattr(pool_setup, "available_memory", lambda: 2 * size)
    with caplog.at_level(logging.WARNING):
        startup.check_weights_fit(described, torch.bfloat16, settings)
    said = "weights in HQQ with 4 bits are expanded when they are read: 680.4 KiB in the files take 2.1 MiB of memory"
    assert said in caplog.text
    monkeypatch.setattr(pool_setup, "available_memory", lambda: size)
    with pytest.raises(ConfigurationError, match="of memory are available to this worker"):
        startup.check_weights_fit(described, torch.bfloat16, settings)


@pytest.mark.parametrize(
    ("name", "kind", "tensor", "message"),
    [
        ("bitsandbytes-nf4", STATE, None, "has no weight.quant_state.bitsandbytes__ of nf4 or fp4"),
        ("bitsandbytes-nf4", STATE, torch.zeros(3, dtype=torch.uint8), "has a quant_state that is no JSON object"),
        ("bitsandbytes-nf4", STATE, as_bytes("{}"), "has shape None; expected 2 numbers"),
        ("bitsandbytes-nf4", "weight.absmax", torch.ones(5), "weight.absmax has shape [5]; expected [2048]"),
        ("bitsandbytes-nf4", "weight.absmax", torch.ones(8, 256).bfloat16(), "has scales in the order of a CPU"),
        ("bitsandbytes-nf4", "weight", torch.ones(8, 1, dtype=torch.uint8), "has a weight of 8 bytes; expected 65536"),
        (
            "bitsandbytes-nf4-nested",
            STATE,
            as_bytes('{"blocksize": 64, "shape": [256, 512], "nested_blocksize": 256, "nested_offset": "1"}'),
            "has nested_offset '1'; expected a number",
        ),
        ("bitsandbytes-nf4-nested", "weight.nested_absmax", None, "weight.nested_absmax is missing"),
        ("bitsandbytes-int8", "weight_format", torch.tensor(2, dtype=torch.uint8), "has weight_format 2; expected 0"),
        ("modelopt-nvfp4", "weight_scale_2", None, "weight_scale_2 is missing"),
        ("modelopt-nvfp4", "pre_quant_scale", torch.ones(512), "has pre_quant_scale; inputs with scales are not read"),
        (
            "modelopt-nvfp4",
            "weight",
            torch.ones(256, 252, dtype=torch.uint8),
            "has 504 inputs; expected a multiple",
        ),
        ("compressed-nvfp4", "weight_global_scale", None, "weight_global_scale is missing"),
        ("hqq-4", "scale_q", torch.ones(1), "has scales or zeros that are quantized, too"),
        ("hqq-4", "packing", as_bytes("5bit"), "has packing '5bit'; supported: 8bit_u8"),
        ("hqq-4", "group_size", torch.tensor(60), "has axis 1 and group_size 60 for shape [256, 512]"),
        ("hqq-4", "W_q", torch.zeros(2, 2, dtype=torch.uint8), "has 4 bytes of codes; expected 2048 rows of 64"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    tmp_path: Path, name: str, kind: str, tensor: torch.Tensor | None, message: str
) -> None:
    make(tmp_path, name)

    def change(tensors: Tensors) -> Tensors:
        rest = {key: value for key, value in tensors.items() if key != f"{PROJECTION}.{kind}"}
        return rest if tensor is None else rest | {f"{PROJECTION}.{kind}": tensor}

    edit_tensors(tmp_path, change)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("modelopt-fp8", {"quant_algo": "FP8_PB_WO"}, "quant_algo is 'FP8_PB_WO'; supported: FP8, NVFP4"),
        ("auto-round-gptq", {"packing_format": "auto_round"}, "packing_format is 'auto_round'; supported: auto_round:"),
        ("auto-round-gptq", {"data_type": "mx_fp"}, "data_type is 'mx_fp'; supported: int"),
        ("hqq-4", {"quant_method": "mlx"}, "quant_method is 'mlx'; weights of MLX are not read"),
    ],
)
def test_configurations_that_are_not_read_are_refused(
    tmp_path: Path, name: str, fields: dict[str, Any], message: str
) -> None:
    make(tmp_path, name)
    edit_config(tmp_path, quantization_config=FORMATS[name][1] | fields)
    assert_refused(tmp_path, message)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Int4TilePackedTo4dTensor", "is a 'Int4TilePackedTo4dTensor' of torchao; supported: Int8Tensor, "),
        (None, "has a header that is no JSON object"),
    ],
)
def test_other_types_of_torchao_are_refused(tmp_path: Path, kind: str | None, message: str) -> None:
    make_model(tmp_path, LLAMA)
    quantize_model(tmp_path, torchao_octets, **TORCHAO)
    if kind is not None:
        describe_for_torchao(tmp_path, kind)
    assert_refused(tmp_path, message)


def assert_refused(directory: Path, message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        load_model(directory, device=CPU, dtype=torch.bfloat16)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
