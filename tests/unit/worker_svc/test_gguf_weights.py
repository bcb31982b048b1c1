"""Weights of GGUF files equal the weights that transformers reads from the same file."""

import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from quire.constraints.matcher import Vocabulary
from quire.model_files.gguf_header import GgufHeader
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import ModelFingerprint
from quire_kernels.packed_weight import CodedWeight, Coding, Quantization
from tests.support.coded_weights import make_coded
from tests.support.gguf_files import write_gguf
from tests.support.models import (
    NATIVE,
    STATES,
    Family,
    edit_config,
    make_model,
    make_remote_model,
    make_tokenizer,
    randomize,
)
from tests.support.paged import PagedRunner, Span, codings_in_use, codings_of
from tests.support.tiers import is_third_tier
from worker_svc.gguf_weights import gguf_weights
from worker_svc.layers.embedding_norm import Embedding
from worker_svc.layers.linear import Linear
from worker_svc.models.registry import load_model
from worker_svc.weights import Checkpoint

Kind = gguf.GGMLQuantizationType
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def make(directory: Path, family: str):
    """A model of the family, written to the directory."""
    if family in ("llama", "gpt2"):
        return make_model(directory, {"llama": "llama-gqa-untied-32", "gpt2": "gpt2-tied-32"}[family])
    if family in (families := FURTHER | OTHERS | WITH_STATES):
        return make_model(directory, families[family])
    config_class, model_class = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}[
        family
    ]
    model = model_class(config_class(**SIZES, head_dim=16, tie_word_embeddings=True)).eval()
    randomize(model, 0)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}
# Values that no file has are as in llama.cpp: scores are scaled by the size of heads, one layer of six has no window.
FURTHER = {
    "gemma": Family("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma2": Family("Gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20, **CAPS}),
    "gemma3": Family(
        "Gemma3",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 20, "num_hidden_layers": 6},
        "Gemma3TextConfig",
    ),
    "mixtral": Family("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": Family("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": Family("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "phi3": Family("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "phi3_long": Family(
        "Phi3",
        {
            "sliding_window": 20,
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.25, 2.0],
                "long_factor": [1.0, 3.0, 10.0, 30.0],
            },
        },
    ),
}


SHAPED = ("layer_types", "sliding_window", "use_sliding_window")


def without(name: str, *fields: str, **changes: Any) -> Family:
    """A model of `NATIVE` without some fields, which no file has."""
    family = (NATIVE | STATES)[name]
    return replace(family, fields={key: each for key, each in family.fields.items() if key not in fields} | changes)


# Files have the same layers with windows as all models of these families.
FOUR_LAYERS = {"num_hidden_layers": 4, "sliding_window": 20, "layer_types": None}
OTHERS = {
    **{
        name: NATIVE[name]
        for name in (
            *("granite", "granite-moe", "granite-moe-shared", "seed-oss", "olmo", "olmo2", "olmo3-alternating"),
            *("glm", "glm4", "glm4-moe", "solar-open-moe", "exaone4", "exaone4-alternating", "cohere"),
            *("cohere-head-norms", "stablelm", "stablelm-parallel", "stablelm-head-norms", "ernie4.5", "ernie4.5-moe"),
            *("hunyuan-moe", "gpt-oss-moe", "minimax-m2", "nemotron", "arcee", "jais2", "exaone-moe"),
            *("deepseek-v2", "deepseek-v2-grouped", "deepseek-v3", "deepseek-v3-yarn", "glm4-moe-lite", "youtu"),
        )
    },
    "olmoe": without("olmo-clamped-moe", "norm_topk_prob"),
    "smollm3": without("smollm3", *SHAPED),
    "ministral3": without("ministral3", *SHAPED),
    "cohere2": Family("Cohere2", FOUR_LAYERS, num_calls=4),
    "starcoder2": Family("Starcoder2", {"sliding_window": None}),
    "hunyuan-dense": Family("HunYuanDenseV1", {"head_dim": 16}),
    "phi-moe": NATIVE["phi-moe"],
    "dots1": without("dots1-moe", *SHAPED),
    **{name: NATIVE[name] for name in ("gemma4-shared", "gemma4-wide-shared", "gemma4-moe", "gemma3n-shared")},
}
FALCON_BIASES = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")
NEMOTRON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
}
NEMOTRON_EXPERTS = {
    "layers_block_type": ["mamba", "moe", "attention", "moe"],
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
STATES_OF_BAMBA = {"num_hidden_layers": 3, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
WITH_STATES = {
    "qwen3.5": STATES["qwen3.5"],
    "qwen3.5-as-many-values": without("qwen3.5", linear_num_value_heads=2),
    "qwen3.5-moe": Family(
        "Qwen3_5Moe", {**STATES["qwen3-next-moe"].fields, "norm_topk_prob": True}, "Qwen3_5MoeTextConfig", num_calls=1
    ),
    "qwen3-next-moe": without("qwen3-next-moe", norm_topk_prob=True),
    "lfm2": without("lfm2", conv_bias=False),
    "lfm2-moe": STATES["lfm2-moe"],
    "granite-hybrid": without("granite-hybrid", "time_step_limit"),
    "granite-hybrid-moe": without(
        *("granite-hybrid", "time_step_limit"), num_local_experts=4, num_experts_per_tok=2, position_embedding_type=None
    ),
    # No converter takes biases with factors.
    "falcon-h1": without("falcon-h1", *FALCON_BIASES, tie_word_embeddings=False),
    "falcon-h1-biases": without(
        "falcon-h1",
        *(name for name in STATES["falcon-h1"].fields if "multiplier" in name),
        tie_word_embeddings=False,
        mamba_rms_norm=False,
    ),
    "falcon-h1-tied": without("falcon-h1", *FALCON_BIASES, tie_word_embeddings=True),
    "jamba": STATES["jamba"],
    "jamba-dense": without("jamba", num_experts=1, mamba_proj_bias=False),
    "mamba": STATES["mamba"],
    "falcon-mamba": without("falcon-mamba", mixer_rms_eps=1e-6, tie_word_embeddings=False),
    "mamba-2": STATES["mamba-2"],
    "bamba": Family("Bamba", {**STATES_OF_BAMBA, "attn_layer_indices": [1]}),
    "nemotron-h": Family("NemotronH", NEMOTRON | {"layers_block_type": ["mamba", "attention", "mlp", "mamba"]}),
}
"""Families that only Quire's own decoder runs from a file."""


@pytest.mark.parametrize(
    ("family", "model_impl"),
    [
        *((family, "auto") for family in (*OTHERS, *WITH_STATES) if family != "falcon-h1-tied"),
        *((family, "auto") for family in ("llama", "qwen2", "qwen3", "gpt2", *FURTHER)),
        *(pytest.param(family, "transformers", marks=pytest.mark.long) for family in FURTHER),
    ],
)
def test_a_model_of_a_file_computes_what_that_of_its_directory_does(
    tmp_path: Path, family: str, model_impl: str
) -> None:
    make(tmp_path / "model", family)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model")
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32, "model_impl": model_impl}
    read: list[tuple[int, int]] = []
    of_file = load_model(file, **cpu, progress=lambda done, total: read.append((done, total)))
    of_directory = load_model(tmp_path / "model", **cpu)
    tokens = [3 + 7 * index % 300 for index in range(40)]
    found, expected = (
        PagedRunner(model, [tokens], block_size=4).step(Span(0, 0, 40)) for model in (of_file, of_directory)
    )
    # The factors of Gemma's norms were rounded when 1 was added to them. Decays of states were rounded, too.
    rounded = family.startswith("gemma") or family in WITH_STATES
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 if rounded else 0)
    assert len(read) > 10
    assert read[-1][0] == read[-1][1] > 100_000
    if model_impl == "transformers":
        assert read[0] == (0, read[-1][1])
    assert (of_file.max_model_len, of_file.vocab_size) == (of_directory.max_model_len, of_directory.vocab_size)


PLAIN_HUNYUAN = Family("HunYuanDenseV1", {"head_dim": 16})
LONG_FACTORS: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
LONG_FACTORS |= {"short_factor": [1.0, 1.1, 1.25, 2.0], "long_factor": [1.0, 3.0, 10.0, 30.0]}
BY_ANOTHER_NAME: dict[str, tuple[Family | None, dict[str, Any]]] = {
    "orion": (Family("StableLm", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}), {}),
    # The field counts gate and up.
    "qwen": (Family("Qwen2"), {"qwen.feed_forward_length": 192}),
    "codeshell": (Family("Starcoder2", {"sliding_window": None}), {}),
    "bailingmoe2": (NATIVE["glm4-moe"], {}),
    "maincoder": (PLAIN_HUNYUAN, {}),
    "hunyuan_vl": (NATIVE["hunyuan-dense"], {"hunyuan_vl.rope.scaling.alpha": 1000.0}),
    "minicpm3": (replace(NATIVE["minicpm3"], fields=NATIVE["minicpm3"].fields | {"rope_parameters": LONG_FACTORS}), {}),
    "deepseek": (None, {}),
    "bailingmoe": (None, {}),
    "deepseek2-ocr": (None, {"deepseek2-ocr.rope.dimension_count": 0}),
    "plm": (None, {}),
    "nemotron_h_moe": (
        Family("NemotronH", NEMOTRON | NEMOTRON_EXPERTS),
        {"nemotron_h_moe.expert_shared_feed_forward_length": 48},
    ),
}
"""Architectures of files, the family that they are files of, and further fields; None: transformers has no class."""
ROUNDED = ("hunyuan_vl", "nemotron_h_moe")


@pytest.mark.parametrize("architecture", BY_ANOTHER_NAME)
def test_files_of_an_architecture_compute_what_a_family_of_another_name_does(tmp_path: Path, architecture: str) -> None:
    family, further = BY_ANOTHER_NAME[architecture]
    if family is None:
        make_remote_model(tmp_path, "plm" if architecture == "plm" else "deepseek")
    else:
        make_model(tmp_path, family)
    of_directory = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    edit_config(tmp_path, model_type=architecture)
    fused, merged = architecture in ("qwen", "codeshell", "bailingmoe2"), architecture in ("minicpm3", "plm")
    file = write_gguf(tmp_path / "m.gguf", tmp_path, further=further, fused=fused, merged_latents=merged)
    of_file = load_model(file, device=torch.device("cpu"), dtype=torch.float32)
    tokens = [3 + 7 * index % 300 for index in range(40)]
    found, expected = (
        PagedRunner(model, [tokens], block_size=4).step(Span(0, 0, 40)) for model in (of_file, of_directory)
    )
    # The base of HunYuan VL's rotation is a number of 32 bits in the file. Decays of states were rounded.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if architecture in ROUNDED else 0)


def test_old_files_have_the_inputs_of_delta_rules_in_one_tensor(tmp_path: Path) -> None:
    make(tmp_path / "model", "qwen3-next-moe")
    new, old = write_gguf(tmp_path / "n.gguf", tmp_path / "model"), tmp_path / "o.gguf"
    write_gguf(old, tmp_path / "model", joined_inputs=True, further={"qwen3next.full_attention_interval": 3})
    assert ModelDirectory.open(old).config["model_type"] == "qwen3_next"
    tokens = [3 + 7 * index % 300 for index in range(40)]
    models = (load_model(each, device=torch.device("cpu"), dtype=torch.float32) for each in (new, old))
    found, expected = (PagedRunner(model, [tokens], block_size=4).step(Span(0, 0, 40)) for model in models)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("interval", "attending"), [(2, [1]), (3, [2]), (None, [])])
def test_files_without_a_list_of_layers_have_the_interval_of_those_that_attend(
    tmp_path: Path, interval: int | None, attending: list[int]
) -> None:
    make(tmp_path / "model", "qwen3.5")
    further = {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": interval}
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", further=further)
    types = ModelDirectory.open(file).config["layer_types"]
    assert [index for index, each in enumerate(types) if each == "full_attention"] == attending


@pytest.mark.parametrize("architecture", ["exaone", "internlm2", "pangu-embedded", "xverse", "baichuan", "paddleocr"])
def test_some_architectures_are_llamas_by_another_name(tmp_path: Path, architecture: str) -> None:
    make(tmp_path, "llama")
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path)
    edit_config(tmp_path, model_type=architecture)
    file = write_gguf(tmp_path / "m.gguf", tmp_path)
    assert ModelDirectory.open(file).config == ModelDirectory.open(plain).config
    found, expected = gguf_weights(file), gguf_weights(plain)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name].read(), weight.read()), name


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3-yarn"])
def test_old_files_have_the_layer_of_keys_and_values_in_one_tensor(tmp_path: Path, family: str) -> None:
    make(tmp_path / "model", family)
    new = gguf_weights(write_gguf(tmp_path / "n.gguf", tmp_path / "model"))
    old = gguf_weights(write_gguf(tmp_path / "o.gguf", tmp_path / "model", merged_latents=True))
    assert {"blk.0.attn_k_b.weight", "blk.0.attn_kv_b.weight"} <= {
        weight.name for weight in (*new.values(), *old.values())
    }
    assert ModelDirectory.open(tmp_path / "o.gguf").config == ModelDirectory.open(tmp_path / "n.gguf").config
    assert new.keys() == old.keys()
    for name, weight in old.items():
        assert (new[name].shape, new[name].num_bytes) == (weight.shape, weight.num_bytes), name
        assert torch.equal(new[name].read(), weight.read()), name


@pytest.mark.parametrize("has_drafts", [False, True])
def test_layers_that_draft_tokens_are_left_out(tmp_path: Path, has_drafts: bool) -> None:
    make(tmp_path / "model", "glm4-moe")
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    if has_drafts:
        save_file({**load_file(weights), "model.layers.2.eh_proj.weight": torch.ones(64, 128)}, weights)
    numbers = {"glm4moe.block_count": 3, "glm4moe.nextn_predict_layers": 1}
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", further=numbers)
    assert ModelDirectory.open(file).config == ModelDirectory.open(plain).config
    assert gguf_weights(file).keys() == gguf_weights(plain).keys()


@pytest.mark.parametrize(("family", "is_fused"), [("gemma3n-shared", False), ("gemma4-wide-shared", True)])
def test_keys_of_layers_that_read_those_of_earlier_ones_are_left_out(
    tmp_path: Path, family: str, is_fused: bool
) -> None:
    """Published directories have them, and the converter writes them."""
    make_model(tmp_path / "model", family)
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path / "model")
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(weights)
    last = f"model.layers.{NATIVE[family].fields['num_hidden_layers'] - 1}.self_attn"
    norm = tensors[f"{last}.k_norm.weight"] = torch.ones_like(tensors[f"{last}.q_norm.weight"])
    for name in ("k_proj", "v_proj"):
        tensors[f"{last}.{name}.weight"] = torch.ones(2 * len(norm), 64)
    save_file(tensors, weights)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", fused=is_fused)
    assert len(GgufHeader.read(file).tensors) != len(GgufHeader.read(plain).tensors)
    found, expected = (load_model(each, device=torch.device("cpu"), dtype=torch.float32) for each in (file, plain))
    tokens = [3 + 7 * index % 300 for index in range(40)]
    assert torch.equal(*(PagedRunner(each, [tokens], block_size=4).step(Span(0, 0, 40)) for each in (found, expected)))


@pytest.mark.parametrize(
    ("family", "further", "problem"),
    [
        ("gemma3n-shared", {"gemma3n.activation_sparsity_scale": [0, 0]}, "activation_sparsity_scale is no list of"),
        ("gemma3n-shared", {"gemma3n.feed_forward_length": [96, 96]}, "[96, 96]; expected are 4 numbers from 1 to"),
        ("qwen3.5", {"qwen35.attention.recurrent_layers": [True]}, "recurrent_layers has 1 entries for 3 layers"),
        ("qwen3.5", {"qwen35.ssm.inner_size": 130}, "ssm.inner_size is 130, no multiple of ssm.time_step_rank, which"),
        ("lfm2", {"lfm2.attention.sliding_window": 8}, "sliding windows of lfm2 are not read"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 2, 4]}, "[0, 2, 4], which differs by layer; such models are not"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, -1, 0]}, "is -1; expected is a number from 1 to"),
        ("lfm2-moe", {"lfm2moe.expert_gating_func": 1}, "its experts are not chosen by sigmoids (expert_gating_func)"),
        ("falcon-h1-tied", {}, "it has no output.weight, so that the factor of the logits is not known"),
        ("gemma4-shared", {"gemma4.rope.dimension_count_swa": 8}, "rope.dimension_count_swa is not 16, the size of"),
        ("gemma4-shared", {"gemma4.rope.scaling.type": "linear"}, "rope.scaling.type is 'linear', which is not read"),
        ("gemma4-shared", {"rope": [1.0] * 15 + [2.0]}, "rope_freqs.weight is not 1 for the first pairs of a head and"),
        ("deepseek-v2", {"deepseek2.expert_weights_norm": True}, "normalized weights are not read"),
        ("deepseek-v2", {"deepseek2.rope.dimension_count": 40}, "rope.dimension_count is 40, of keys of 40 dimensions"),
        ("deepseek-v3", {"deepseek2.expert_used_count": 5}, "expert_used_count is 5, more than the 4 experts"),
        ("glm4-moe", {"glm4moe.expert_gating_func": 1}, "its experts are not chosen by sigmoids (expert_gating_func)"),
        ("glm4-moe", {"glm4moe.nextn_predict_layers": 2}, "nextn_predict_layers is 2, of 2 layers"),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": [True]}, "sliding_window_pattern has 1 entries for 4"),
        ("exaone4-alternating", {"exaone4.rope.freq_base_swa": 5e4}, "rope.freq_base_swa differs from rope.freq_base"),
        ("granite", {"granite.rope.scaling.finetuned": False}, "it has no positions (rope.scaling.finetuned)"),
        ("glm4", {"glm4.rope.dimension_sections": [4, 2, 2, 0]}, "the language model of a vision model"),
        ("ministral3", {"mistral3.rope.scaling.type": "none"}, "is read only with a rotation of the type yarn"),
    ],
)
def test_what_a_family_does_not_have_is_refused(
    tmp_path: Path, family: str, further: dict[str, Any], problem: str
) -> None:
    make(tmp_path / "model", family)
    with pytest.raises(ConfigurationError) as caught:
        ModelDirectory.open(write_gguf(tmp_path / "m.gguf", tmp_path / "model", further=further))
    assert problem in str(caught.value)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_files_of_models_that_read_images_are_those_of_their_language_models(tmp_path: Path, family: str) -> None:
    make(tmp_path, family)
    plain = write_gguf(tmp_path / "plain.gguf", tmp_path)
    edit_config(tmp_path, model_type=f"{family}vl")
    file = write_gguf(tmp_path / "vl.gguf", tmp_path, further={f"{family}vl.rope.dimension_sections": [2, 3, 3, 0]})
    assert ModelDirectory.open(file).config == ModelDirectory.open(plain).config
    assert gguf_weights(file).keys() == gguf_weights(plain).keys()


CODED_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}


def code_as_a_mix(name: str, data: np.ndarray) -> tuple[np.ndarray, Kind]:
    """Codes as in files of Q4_K_M: some of the matrices have longer codes, or none."""
    if any(each in name for each in ("altup", "laurel", "per_layer_model_proj")):
        return data, Kind.F32
    is_long = "attn_v" in name or "ffn_down" in name or name == "output"
    coding = Coding.Q6_K if is_long else Coding.Q4_K
    num_rows = math.prod(data.shape[:-1])
    weight = make_coded(coding, num_rows, data.shape[-1] // coding.group[0], zlib.crc32(name.encode()))
    return weight.rows.numpy().reshape(*data.shape[:-1], -1), Kind[coding.value]


CODED = {
    **{family: Family(family.capitalize(), {"head_dim": 64}) for family in ("llama", "qwen2", "qwen3")},
    **{family: FURTHER[family] for family in ("mixtral", "qwen2_moe", "qwen3_moe", "gemma2", "gemma3")},
    "phi3": Family("Phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    **{family: NATIVE[family] for family in ("granite", "exaone4")},
}


CODED_CASES = (
    *(("llama", 1, False), ("qwen3", 1, False), ("qwen2", 1, True), ("llama", 2, False), ("mixtral", 1, False)),
    *(("llama", 2, True), ("qwen3_moe", 2, False), ("qwen2_moe", 1, True), ("gemma3", 2, True), ("gemma2", 1, True)),
    *(("phi3", 2, False), ("phi3", 1, False), ("granite", 1, False), ("exaone4", 1, True)),
)


@pytest.mark.parametrize(("family", "num_ranks", "tied"), CODED_CASES if is_third_tier() else CODED_CASES[::2])
def test_weights_are_multiplied_as_the_file_has_them(
    tmp_path: Path, family: str, num_ranks: int, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits, too, are logits of the dequantized weights, bit for bit."""
    experts = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 256}
    sizes: dict[str, Any] = {**CODED_SIZES, **(experts if "moe" in family else {})}
    # Each rank's inputs are whole groups.
    sizes |= {"phi3": {"hidden_size": 512}, "gemma3": {"head_dim": 64}}.get(family, {})
    make_model(tmp_path / "model", CODED[family], tie_word_embeddings=tied, **sizes)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=code_as_a_mix)
    codings = codings_in_use(file, num_ranks, monkeypatch)
    # The router has no codes in any file.
    of_router = {None} if "moe" in family or family == "mixtral" else set()
    assert codings == {True: {Coding.Q4_K, Coding.Q6_K, *of_router}, False: {None}}


LAYER_INPUTS: dict[str, Any] = {
    "gemma3n-shared": {"intermediate_size": 4 * [512]},
    "gemma4-shared": {"global_head_dim": 64},
    "gemma4-moe": {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "moe_intermediate_size": 256},
}


@pytest.mark.parametrize("family", LAYER_INPUTS)
def test_weights_of_models_with_inputs_of_each_layer_are_multiplied_as_the_file_has_them(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of these inputs is looked up so, too."""
    sizes = CODED_SIZES | {"head_dim": 32, "hidden_size_per_layer_input": 256} | LAYER_INPUTS[family]
    make_model(tmp_path / "model", family, **sizes)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=code_as_a_mix)
    model = load_model(file, device=torch.device("cpu"), dtype=torch.bfloat16)
    tables = [module for module in model.modules() if isinstance(module, Embedding)]
    assert len(tables) == (1 if family == "gemma4-moe" else 2)
    assert all(isinstance(table.matrix, CodedWeight) for table in tables)
    assert {Coding.Q4_K, Coding.Q6_K} <= codings_in_use(file, 1, monkeypatch)[True]


CODED_STATES: dict[str, dict[str, Any]] = {
    "qwen3.5": {"linear_key_head_dim": 64, "linear_value_head_dim": 128},
    "qwen3-next-moe": {
        "linear_value_head_dim": 64,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    # Heads of value are whole groups of codes.
    "qwen3.5-wide": {"linear_key_head_dim": 64, "linear_value_head_dim": 256},
    "lfm2": {},
    "granite-hybrid": {"shared_intermediate_size": 256, "mamba_proj_bias": False},
}


@pytest.mark.parametrize("family", CODED_STATES if is_third_tier() else [*CODED_STATES][::2])
def test_weights_of_layers_that_keep_a_state_are_multiplied_as_the_file_has_them(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but routers and columns of values in another order that are no whole groups."""
    sizes: dict[str, Any] = CODED_SIZES | {"head_dim": 64} | CODED_STATES[family]
    make_model(tmp_path / "model", WITH_STATES[family.removesuffix("-wide")], **sizes)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=code_as_a_mix)
    model = load_model(file, device=torch.device("cpu"), dtype=torch.bfloat16)
    plain = {
        ".".join(name.split(".")[-2:])
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and None in codings_of(layer)
    }
    assert plain - {"mlp.router", "mlp.shared_gate"} == ({"state.output"} if family == "qwen3.5" else set())
    assert {Coding.Q4_K, Coding.Q6_K} <= codings_in_use(file, 1, monkeypatch)[True]


def test_weights_are_rounded_to_int8_from_the_numbers_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even weights that the output layer shares with the embedding."""
    make_model(tmp_path / "model", CODED["qwen2"], tie_word_embeddings=True, **CODED_SIZES)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=code_as_a_mix)
    found = codings_in_use(file, 1, monkeypatch, quantization=Quantization.INT8_WEIGHT_ONLY)
    assert found == {True: {None}, False: {None}}


def test_a_quantized_tensor_of_experts_is_read_expert_by_expert(tmp_path: Path) -> None:
    make_model(tmp_path / "model", FURTHER["mixtral"])
    weights = gguf_weights(write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=Kind.Q8_0))
    stored = next(
        each for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors if each.name == "blk.1.ffn_up_exps.weight"
    )
    expected = gguf.dequantize(stored.data, Kind.Q8_0)
    for expert in range(4):
        found = weights[f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight"]
        assert torch.equal(found.read(), torch.from_numpy(expected[expert])), expert
        assert found.num_bytes == stored.n_bytes // 4
    assert weights["model.layers.1.block_sparse_moe.gate.weight"].dtype == "F32"


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral", "qwen3_moe", "granite", "gemma4-shared"])
def test_tensors_that_a_converter_has_merged_are_read_apart(tmp_path: Path, family: str, kind: Kind) -> None:
    make(tmp_path / "model", family)
    apart = gguf_weights(write_gguf(tmp_path / "a.gguf", tmp_path / "model", quantization=kind))
    merged = gguf_weights(write_gguf(tmp_path / "m.gguf", tmp_path / "model", quantization=kind, fused=True))
    assert "blk.0.attn_qkv.weight" in {weight.name for weight in merged.values()}
    assert merged.keys() == apart.keys()
    for name, weight in apart.items():
        assert (merged[name].shape, merged[name].num_bytes) == (weight.shape, weight.num_bytes), name
        assert torch.equal(merged[name].read(), weight.read()), name
    assert ModelDirectory.open(tmp_path / "m.gguf").config == ModelDirectory.open(tmp_path / "a.gguf").config


def write_tensors(file: Path, **tensors: tuple[np.ndarray, Kind | None]) -> None:
    """Writes a file with only these tensors; names have "__" for each point."""
    writer = gguf.GGUFWriter(file, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name.replace("__", "."), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_weights_in_nvfp4_are_multiplied_by_the_scales_beside_them(tmp_path: Path) -> None:
    elements, num_bytes = gguf.GGML_QUANT_SIZES[Kind.NVFP4]
    data = np.random.default_rng(0).integers(0, 120, (3, 8, 128 // elements * num_bytes), np.uint8)
    write_tensors(
        tmp_path / "m.gguf",
        output__weight=(data[0], Kind.NVFP4),
        output__scale=(np.array([0.5], np.float32), None),
        output__input_scale=(np.array([7], np.float32), None),
        blk__0__ffn_up_exps__weight=(data, Kind.NVFP4),
        blk__0__ffn_up_exps__scale=(np.array([2, 3, 4], np.float32), None),
    )
    found, plain = gguf_weights(tmp_path / "m.gguf"), torch.from_numpy(gguf.dequantize(data, Kind.NVFP4))
    assert torch.equal(found["lm_head.weight"].read(), plain[0] * 0.5)
    for expert in range(3):
        name = f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"
        assert torch.equal(found[name].read(), plain[expert] * (2 + expert))
    assert len(found) == 4


def test_scales_that_are_not_one_for_each_expert_are_refused(tmp_path: Path) -> None:
    write_tensors(
        tmp_path / "m.gguf",
        blk__0__ffn_up_exps__weight=(np.zeros((3, 8, 32), np.float32), None),
        blk__0__ffn_up_exps__scale=(np.array([2, 3], np.float32), None),
    )
    problem = "tensor blk.0.ffn_up_exps.scale has 2 numbers; expected 1 or 3, one for each expert"
    with pytest.raises(ConfigurationError, match=problem):
        gguf_weights(tmp_path / "m.gguf")


def test_parts_are_read_as_one_file(tmp_path: Path) -> None:
    make(tmp_path / "model", "qwen2")
    whole = gguf_weights(write_gguf(tmp_path / "whole.gguf", tmp_path / "model"))
    first = write_gguf(tmp_path / "m.gguf", tmp_path / "model", tensors_per_part=10)
    assert first.name == "m-00001-of-00003.gguf"
    for part in (first, tmp_path / "m-00003-of-00003.gguf"):
        weights = gguf_weights(part)
        assert weights.keys() == whole.keys()
        for name in whole:
            assert torch.equal(weights[name].read(), whole[name].read()), name


def read_kinds() -> list[Kind]:
    kinds = []
    for kind in Kind:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            kinds.append(kind)
        except NotImplementedError:
            pass
    return kinds


@pytest.mark.parametrize("kind", read_kinds(), ids=lambda kind: kind.name)
def test_every_quantization_of_the_package_is_read(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_svc.gguf_weights._CHUNK_ELEMENTS", 3000)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = max(elements, 32) * 4
    generator = np.random.default_rng(0)
    data = generator.integers(0, 60, (17, columns // elements * num_bytes), np.uint8)
    write_tensors(tmp_path / "m.gguf", output__weight=(data, kind))
    found = gguf_weights(tmp_path / "m.gguf")["lm_head.weight"]
    assert (found.dtype, found.shape, found.num_bytes) == (kind.name, (17, columns), data.nbytes)
    expected = torch.from_numpy(np.ascontiguousarray(gguf.dequantize(data, kind), np.float32))
    assert torch.equal(found.read().float().nan_to_num(), expected.nan_to_num())


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    for name, kind, problem in (
        ("output.weight", Kind.Q8_K, "tensor output.weight is Q8_K, which is not read"),
        ("blk.0.ssm_in.weight", Kind.F32, "tensor blk.0.ssm_in.weight is not known in models of llama"),
    ):
        num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        write_tensors(tmp_path / "m.gguf", **{name: (np.zeros((2, num_bytes * 2), np.uint8), kind)})
        with pytest.raises(ConfigurationError) as caught:
            gguf_weights(tmp_path / "m.gguf")
        assert str(caught.value) == f"{tmp_path}/m.gguf: {problem}"


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_tensor_that_the_model_would_ignore_is_refused(tmp_path: Path, family: str) -> None:
    """The bias of attention's output, which Llama of transformers has with its inputs' biases or not at all."""
    make(tmp_path / "model", family)
    (weights,) = (tmp_path / "model").glob("*.safetensors")
    save_file({**load_file(weights), "model.layers.1.self_attn.o_proj.bias": torch.ones(128)}, weights)
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model")
    with pytest.raises(ConfigurationError, match=r"tensor blk\.1\.attn_output\.bias is not one that this model has"):
        load_model(file, device=torch.device("cpu"), dtype=torch.float32)


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama-gqa-untied-32")
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model")
    content = file.read_bytes()
    for length in (len(content) - 1000, len(content) // 2, 5000, 100, 3, 0):
        file.write_bytes(content[:length])
        with pytest.raises(ConfigurationError, match=r"m\.gguf"):
            gguf_weights(ModelDirectory.open(file).path)


def test_what_a_start_reads_of_a_model_needs_its_header_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "model", "llama")
    read: list[Path] = []
    read_file = GgufHeader._read_file
    monkeypatch.setattr(GgufHeader, "_read_file", lambda path: read.append(path) or read_file(path))
    model = ModelDirectory.open(write_gguf(tmp_path / "m.gguf", tmp_path / "model"))
    assert ModelFingerprint.read(model).weights
    assert Checkpoint.open(model.path, base_prefix="model.", gguf=model.gguf).tensors
    assert len(Vocabulary.of_model(model, None).token_bytes) == model.config["vocab_size"]
    assert len(read) == 1
