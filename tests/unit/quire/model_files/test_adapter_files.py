"""Adapters in PEFT's format are read; unusable ones are refused in one line that names file and value."""

import json
import math
import os
import shutil
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.model_files.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    UnusableAdapterError,
    check_digest,
    check_fits,
    read_adapter,
)
from tests.support.adapter_files import CONFIG, write_adapter, write_tensors

Q = "model.layers.0.self_attn.q_proj"


def line_of(directory: Path) -> str:
    with pytest.raises(UnusableAdapterError) as raised:
        read_adapter(directory)
    line = str(raised.value)
    assert "\n" not in line
    return line


def test_modules_have_their_shapes_and_scales(tmp_path: Path) -> None:
    write_adapter(tmp_path, {Q: (4, 16, 32), "model.layers.1.mlp.down_proj": (8, 64, 16)}, lora_alpha=16)
    adapter = read_adapter(tmp_path)
    assert (adapter.rank, adapter.alpha, adapter.target_modules) == (8, 16.0, ("down_proj", "q_proj"))
    module = adapter.modules[Q]
    assert (module.rank, module.num_inputs, module.num_outputs, module.scale) == (4, 16, 32, 4.0)
    assert adapter.modules["model.layers.1.mlp.down_proj"].scale == 2.0


def test_scales_follow_patterns_and_rslora(tmp_path: Path) -> None:
    modules = {Q: (4, 16, 16), "model.layers.1.self_attn.q_proj": (4, 16, 16)}
    pattern = {"^model.layers.1.self_attn.q_proj": 2, "q_proj": 6}
    write_adapter(tmp_path, modules, use_rslora=True, alpha_pattern=pattern)
    scales = [module.scale for module in read_adapter(tmp_path).modules.values()]
    assert scales == [6 / math.sqrt(4), 2 / math.sqrt(4)]


@pytest.mark.parametrize("pattern", [r"layers\.0\.self_attn\.q_proj", "self.attn.q_proj"])
def test_a_pattern_is_a_regular_expression_as_in_peft(tmp_path: Path, pattern: str) -> None:
    write_adapter(tmp_path, {Q: (4, 16, 16)}, alpha_pattern={pattern: 6})
    assert read_adapter(tmp_path).modules[Q].scale == 6 / 4


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("harm",)


@pytest.mark.parametrize(
    ("tensor", "part"),
    [
        (Harmful(), "it names __builtin__.print"),
        (torch.zeros(4, 16, dtype=torch.int8), "it names torch.CharStorage"),
        (torch.zeros(1).expand(1 << 20, 1 << 20), "a tensor (1048576, 1048576) with strides (0, 0) of 1 numbers"),
        (torch.zeros(16, 4).t(), "with strides (1, 4)"),
        (7, "has no attribute 'dtype'"),
    ],
)
def test_of_a_pickle_tensors_alone_are_read(
    tmp_path: Path, tensor: object, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).unlink()
    file = tmp_path / "adapter_model.bin"
    names = [f"base_model.model.{Q}.lora_{side}.weight" for side in "AB"]
    torch.save(OrderedDict(zip(names, (torch.zeros(4, 16), torch.zeros(16, 4)), strict=True)), file)
    assert read_adapter(tmp_path).modules[Q].num_inputs == 16
    torch.save(dict(zip(names, (tensor, torch.zeros(16, 4)), strict=True)), file)
    assert part in line_of(tmp_path)
    assert str(file) in line_of(tmp_path)
    assert capsys.readouterr().out == ""


def test_the_digest_is_of_both_files_and_of_nothing_else(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a")
    write_adapter(tmp_path / "b")
    write_adapter(tmp_path / "c", lora_alpha=3)
    (tmp_path / "b" / "README.md").write_text("trained on a Tuesday")
    first, same, other = (read_adapter(tmp_path / name) for name in "abc")
    assert first.digest == same.digest != other.digest
    check_digest(first, same.digest)
    with pytest.raises(UnusableAdapterError, match="have changed since it was loaded"):
        check_digest(first, other.digest)


@pytest.mark.parametrize("init", [None, True, False, "gaussian", "eva", "orthogonal", "mica", "MiCA"])
def test_initialisations_that_leave_the_weights_as_they_are_are_read(tmp_path: Path, init: object) -> None:
    assert read_adapter(write_adapter(tmp_path, init_lora_weights=init)).modules


def test_what_velora_needs_for_gradients_is_left_out(tmp_path: Path) -> None:
    """PEFT 0.21.2 saves such tensors."""
    write_adapter(tmp_path, velora_config={"init_type": "batch_average", "num_groups": 8, "scale": 1.0})
    names = {f"base_model.model.{Q}.lora_{side}.weight": shape for side, shape in (("A", [4, 16]), ("B", [16, 4]))}
    write_tensors(tmp_path / WEIGHTS_FILE, {**names, f"base_model.model.{Q}.lora_velora_embed": [6]})
    assert [*read_adapter(tmp_path).modules] == [Q]
    write_tensors(tmp_path / WEIGHTS_FILE, {f"base_model.model.{Q}.lora_velora_embed": [6]})
    assert "has no tensors" in line_of(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("use_dora", True, "is DoRA"),
        ("use_bdlora", {"nblocks": 2}, "is BD-LoRA"),
        ("kasa_config", {"beta": 0.1}, "is KaSA"),
        ("monteclora_config", {"num_samples": 8}, "is MonteCLoRA"),
        ("peft_type", "IA3", "peft_type is 'IA3'"),
        ("peft_type", None, "peft_type is None"),
        ("bias", "all", "bias is 'all'"),
        ("modules_to_save", ["lm_head"], "modules_to_save is ['lm_head']"),
        ("init_lora_weights", "pissa", "init_lora_weights is 'pissa'"),
        ("r", 257, "r is 257; it must be a number from 1 to 256"),
        ("r", True, "r is True"),
        ("lora_alpha", "x", "lora_alpha is 'x'"),
        ("lora_alpha", 1e39, "lora_alpha is 1e+39; it must be a number of at most 1e+30"),
        pytest.param("lora_alpha", 10**400, "it must be a number of at most 1e+30", id="alpha-beyond-floats"),
        ("alpha_pattern", {"q_proj": float("nan")}, "alpha_pattern is nan; it must be a number"),
        ("alpha_pattern", {"(a+)+$": 1}, "alpha_pattern has '(a+)+$'"),
        ("alpha_pattern", [1], "alpha_pattern is [1]"),
    ],
)
def test_configurations_that_are_no_lora_are_refused_by_field(
    tmp_path: Path, field: str, value: Any, part: str
) -> None:
    write_adapter(tmp_path, **{field: value})
    line = line_of(tmp_path)
    assert part in line
    assert CONFIG_FILE in line


@pytest.mark.parametrize(
    ("name", "shape", "part"),
    [
        ("base_model.model.lm_head.lora_A.weight", [4, 16], "an embedding or the output head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", [4, 16], "an embedding or the output head"),
        (f"base_model.model.{Q}.lora_magnitude_vector", [16], "is no lora_A or lora_B"),
        (f"base_model.model.{Q}.lora_A.weight", [4, 16, 1], "lora_A and lora_B must be matrices"),
        (f"base_model.model.{Q}.lora_A.weight", [300, 16], "a rank of at most 256"),
        ("base_model.model.other.lora_A.weight", [4, 16], "of other; lora_A and lora_B must be matrices"),
    ],
)
def test_tensors_that_are_no_lora_are_refused_by_name(tmp_path: Path, name: str, shape: list[int], part: str) -> None:
    write_adapter(tmp_path)
    tensors = {f"base_model.model.{Q}.lora_A.weight": [4, 16], f"base_model.model.{Q}.lora_B.weight": [16, 4]}
    write_tensors(tmp_path / WEIGHTS_FILE, tensors | {name: shape})
    assert part in line_of(tmp_path)


@pytest.mark.parametrize(
    ("of_text", "of_images"),
    [
        (Q.replace("model.", "model.language_model.", 1), "model.vision_tower.encoder.layers.30.q_proj"),
        # Qwen2-VL and Qwen2.5-VL of transformers before 4.52.
        (Q, "visual.blocks.30.attn.qkv"),
    ],
)
def test_what_adapts_the_reading_of_images_beside_a_language_model_is_left_out(
    tmp_path: Path, of_text: str, of_images: str
) -> None:
    write_adapter(tmp_path, {of_text: (4, 16, 16), of_images: (4, 8, 8)})
    adapter = read_adapter(tmp_path)
    assert adapter.modules.keys() == {of_text}
    check_fits(adapter, {"num_hidden_layers": 1, "hidden_size": 16})


def test_a_module_that_two_names_or_two_files_have_is_refused_by_both(tmp_path: Path) -> None:
    spelled = ["language_model.model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"]
    write_adapter(tmp_path / "names", dict.fromkeys(spelled, (4, 16, 16)))
    line = line_of(tmp_path / "names")
    assert all(name in line for name in spelled)
    assert "both name model.layers.0.mlp.up_proj" in line
    parts = write_adapter(tmp_path / "files", {Q: (4, 16, 32)})
    (parts / WEIGHTS_FILE).rename(parts / "a.safetensors")
    shutil.copy(parts / "a.safetensors", parts / "b.safetensors")
    index = {"weight_map": {f"{number}": f"{number}.safetensors" for number in "ab"}}
    (parts / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index))
    assert f"a.safetensors and {parts}/b.safetensors both have base_model.model.{Q}.lora_A.weight" in line_of(parts)


def test_other_types_of_numbers_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    write_tensors(tmp_path / WEIGHTS_FILE, {f"base_model.model.{Q}.lora_A.weight": [4, 16]}, dtype="F64")
    assert "has the type F64; supported are BF16, F16, F32" in line_of(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 7, b"\0" * 8, struct.pack("<Q", 1 << 60), struct.pack("<Q", 4) + b"[]{}",
        struct.pack("<Q", 20000) + b"[" * 20000, struct.pack("<Q", 12) + b'{"a": [1,2]}',
        struct.pack("<Q", 2) + b"{}" + b"rest",
    ],
)  # fmt: skip
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    write_adapter(tmp_path)
    (tmp_path / WEIGHTS_FILE).write_bytes(content)
    line = line_of(tmp_path)
    assert WEIGHTS_FILE in line
    assert "damaged or truncated" in line or "has no tensors" in line


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    file = tmp_path / WEIGHTS_FILE
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        assert "damaged or truncated" in line_of(tmp_path)
    file.write_bytes(whole + b"\0")
    assert "damaged or truncated" in line_of(tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    assert "is no directory" in line_of(tmp_path / "nothing")
    assert f"cannot read {tmp_path / CONFIG_FILE}" in line_of(tmp_path)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG))
    assert f"cannot read {tmp_path / WEIGHTS_FILE}" in line_of(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[" * 100_000)
    assert "is not valid JSON" in line_of(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[]")
    assert "is not a JSON object" in line_of(tmp_path)
    assert "File name too long" in line_of(tmp_path / ("x" * 5000))


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    write_adapter(tmp_path)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        assert "is not a regular file" in line_of(tmp_path)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, {"model.layers.3.self_attn.q_proj": (4, 16, 16)})
    adapter = read_adapter(tmp_path)
    check_fits(adapter, {"num_hidden_layers": 4, "hidden_size": 16})
    check_fits(adapter, {})
    with pytest.raises(UnusableAdapterError, match="has 3 layers: it is of another model"):
        check_fits(adapter, {"num_hidden_layers": 3, "hidden_size": 16})
    with pytest.raises(UnusableAdapterError, match="16 inputs; the hidden size of the model is 32"):
        check_fits(adapter, {"num_hidden_layers": 4, "hidden_size": 32})
