"""Models, devices and the roofline: sizes as published, and times that can be checked by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.model_files.model_directory import weight_files
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError
from scheduler_svc.core.step import StepWork
from simulator.hardware import Hardware
from simulator.models import MODELS, ModelShape
from simulator.roofline import Roofline

GIB = 1 << 30


def work(**fields: int) -> StepWork:
    names = ("num_tokens", "num_samples", "num_chunk_tokens", "num_chunks", "context_tokens", "attended_pairs")
    return StepWork(**dict.fromkeys(names, 0) | fields)


# The paper's table 1: hardware, model, GB of parameters, GiB of KV pool, thousands of slots, and our deviation.
TABLE_1 = [
    ("a100-40gb", "opt-13b", 26, 12, 15.7, 0.02),
    ("a100-40gb-x4", "opt-66b", 132, 21, 9.7, 0.03),
    ("a100-80gb-x8", "opt-175b", 346, 264, 60.1, 0.06),
]


@pytest.mark.parametrize(("hardware", "model", "weights", "pool", "slots", "tolerance"), TABLE_1)
def test_presets_are_those_of_table_1(
    hardware: str, model: str, weights: float, pool: float, slots: float, tolerance: float
) -> None:
    device = Hardware.named(hardware)
    assert device.default_model == model
    shape = MODELS[model]
    assert shape.weight_bytes == pytest.approx(weights * 1e9, rel=0.015)
    num_slots = 16 * device.num_blocks(shape, 16, utilization=0.9)
    assert num_slots == pytest.approx(slots * 1e3, rel=tolerance)
    assert num_slots * shape.slot_bytes == pytest.approx(pool * GIB, rel=tolerance)


def test_models_have_as_many_parameters_as_published() -> None:
    published = {"opt-125m": 0.1252, "llama-13b": 13.016, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554}
    for name, billions in published.items():
        assert MODELS[name].num_parameters == pytest.approx(billions * 1e9, rel=1e-3)


def test_a_directory_describes_its_model_exactly() -> None:
    directory = resolve_model(None)
    with weight_files(directory)[0].open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    sizes = [each["data_offsets"][1] - each["data_offsets"][0] for name, each in header.items() if name[0] != "_"]
    shape = ModelShape.read(directory)
    assert shape.weight_bytes == sum(sizes)
    assert shape.with_dtype("float32").weight_bytes == 2 * shape.weight_bytes


def write_config(directory: Path, **fields: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_gpt2_and_opt_are_read_by_their_own_names(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    directory = write_config(tmp_path, architectures=["GPT2LMHeadModel"], **gpt2)
    assert ModelShape.read(directory).num_parameters == 124_439_808
    opt = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272}
    directory = write_config(tmp_path, architectures=["OPTForCausalLM"], max_position_embeddings=2048, **opt)
    assert ModelShape.read(directory).num_parameters == MODELS["opt-125m"].num_parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; it must be a whole number"),
        ({"hidden_size": 10**400}, "hidden_size is 1000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"intermediate_size": None}, "intermediate_size is None"),
        ({"num_local_experts": 8}, "a mixture of experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
    ],
)
def test_a_configuration_without_a_cost_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    limits = {"vocab_size": 100, "max_position_embeddings": 128}
    directory = write_config(tmp_path, architectures=["LlamaForCausalLM"], **(sizes | limits | changes))
    with pytest.raises(ConfigurationError, match=message):
        ModelShape.read(directory)


@pytest.mark.parametrize(
    "windows", [{"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2}, {"sliding_window_pattern": 6}]
)
def test_layers_with_a_window_are_groups_of_their_own(tmp_path: Path, windows: dict[str, Any]) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 12, "num_attention_heads": 4, "intermediate_size": 128}
    limits = {"vocab_size": 100, "max_position_embeddings": 32768}
    config = {"architectures": ["Gemma3ForCausalLM"], **sizes, **limits, "sliding_window": 512}
    dense, shape = (ModelShape.read(write_config(tmp_path, **config, **each)) for each in ({}, windows))
    assert (shape.num_windowed, shape.window, dense.num_windowed) == (10, 512, 0)
    layers, groups = shape.cut(16)
    assert (layers, groups.num_full, groups.num_windowed, groups.window) == (2, 1, 5, 513)
    assert shape.block_bytes(16) == 2 * shape.slot_bytes * 16 // 12
    assert (dense.cut(16)[0], dense.block_bytes(16)) == (12, 16 * dense.slot_bytes)
    # A decode at 16,384 tokens reads a window in ten of the layers.
    one = work(num_tokens=1, num_samples=1, context_tokens=16384, attended_pairs=16384)
    full, windowed = (Roofline(each, A100)._attention(one) for each in (dense, shape))
    assert windowed / full == pytest.approx((2 * 16384 + 10 * 513) / (12 * 16384), rel=0.01)


def test_layers_with_states_take_blocks_of_the_sequence_and_no_slots(tmp_path: Path) -> None:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 2048}
    limits = {"vocab_size": 1000, "max_position_embeddings": 32768, "num_key_value_heads": 4, "num_local_experts": 0}
    mamba = {"mamba_n_heads": 32, "mamba_d_state": 128, "layer_types": [*["mamba"] * 7, "attention"]}
    config = {"architectures": ["GraniteMoeHybridForCausalLM"], **sizes, **limits, **mamba}
    shape = ModelShape.read(write_config(tmp_path, **config))
    assert shape.states is not None
    assert (shape.slot_bytes, shape.num_attending) == (2 * 4 * 64 * 2, 1)
    # A block has 16 tokens, 16 KiB, or two tiles of 128 lines; a layer has 4 of these for each of 32 heads, and 4 more
    # for the convolution: 2,304 channels and 3 lines.
    assert (shape.block_bytes(16), shape.states.unit_bytes) == (16384, 8192)
    assert shape.states.num_units == 7 * (128 + 4)
    assert shape.state_blocks(16) == 7 * (128 + 4) // 2
    # Two devices have half of the heads each, and both have the 256 channels of B and C of the one group.
    halves = shape.split(2)
    assert halves.state_bytes == 2 * 7 * (64 + 2) * 8192
    assert (halves.block_bytes(16), halves.state_blocks(16)) == (16384, 7 * (64 + 2))
    with pytest.raises(ConfigurationError, match="they must divide the heads of its layers with states"):
        shape.split(3)
    # The weights of all layers count, and a decode reads and writes the state.
    of_state_layer = 1024 * (2 * 2048 + 2 * 128 + 32) + 2048 * 1024
    of_layers = 7 * of_state_layer + 1024 * 64 * 2 * 20 + 8 * (3 * 1024 * 2048 + 2 * 1024) + 1024
    assert shape.layer_parameters == of_layers
    one = work(num_tokens=1, num_samples=1, context_tokens=1, attended_pairs=1)
    assert Roofline(shape, A100)._states(one) == pytest.approx(2 * shape.state_bytes / A100.bandwidth)


def test_hardware_that_is_not_known_or_too_small_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'"a200" is not known; there are a100-40gb, .* NAME-xN'):
        Hardware.named("a200")
    with pytest.raises(ConfigurationError, match=r"opt-66b has 131\.4 GB of weights, which leave no room"):
        Hardware.named("a100-40gb").num_blocks(MODELS["opt-66b"], 16, 0.9)


OPT_13B, A100 = MODELS["opt-13b"], Hardware.named("a100-40gb")


def test_few_tokens_take_as_long_as_the_weights_are_read_and_many_as_long_as_they_are_multiplied() -> None:
    costs = Roofline(OPT_13B, A100)
    one = costs.seconds(work(num_tokens=1, num_samples=1, context_tokens=1, attended_pairs=1)).device
    assert one == pytest.approx(OPT_13B.weight_bytes / A100.bandwidth, rel=0.05)
    many = costs.seconds(work(num_tokens=2048, num_samples=1, context_tokens=2048, attended_pairs=2048 * 1024)).device
    assert many == pytest.approx(2 * OPT_13B.layer_parameters * 2048 / A100.flops, rel=0.05)


def test_devices_share_the_work_and_pay_for_collectives() -> None:
    alone, together = (Roofline(OPT_13B, Hardware.named(name)) for name in ("a100-40gb", "a100-40gb-x4"))
    step = work(num_tokens=16, num_samples=16, context_tokens=8000, attended_pairs=8000)
    times = alone.seconds(step).device, together.seconds(step).device
    assert times[0] / 4 < times[1] < times[0]


def test_efficiency_is_a_share_of_the_peaks() -> None:
    step = work(num_tokens=1, num_samples=1, context_tokens=1, attended_pairs=1)
    full, half = (Roofline(OPT_13B, A100, efficiency=share).seconds(step).device for share in (1.0, 0.5))
    assert half == pytest.approx(2 * full, rel=0.05)
    with pytest.raises(ValueError, match=r"efficiency is 1\.5"):
        Roofline(OPT_13B, A100, efficiency=1.5)
