"""Each family and shape compared with transformers: prefill, chunks, decodes and mixes over a scrambled pool."""

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, Gemma3TextConfig, PreTrainedModel

from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from tests.support.models import (
    ALTERNATING,
    FAMILIES,
    FEW_EXPERTS,
    FOREIGN,
    NATIVE,
    STATES,
    VOCAB_SIZE,
    WIDE_LATENT,
    WITH_IMAGES,
    Family,
    edit_config,
    edit_tensors,
    make_model,
    make_remote_model,
)
from tests.support.models import make_model_with_images as make_with_images
from tests.support.paged import PagedRunner, Span
from tests.support.parity import assert_serves_like, expected_logits, make_sequences
from tests.support.threaded_ranks import run_ranks
from tests.support.tiers import is_third_tier, parametrize_in_turn
from worker_svc.layers.activations import CLAMPED_SWIGLU
from worker_svc.layers.experts import Scoring
from worker_svc.layers.mamba import MambaConfig
from worker_svc.layers.mamba2 import Mamba2Config
from worker_svc.models.base import CausalLM, NativeCausalLM
from worker_svc.models.registry import DECODERS, load_model
from worker_svc.parallel.ranks import Ranks
from worker_svc.weights import Placement

Made = Callable[[str], tuple[Path, PreTrainedModel]]
CPU = torch.device("cpu")
HALVED = (
    *("gpt2-tied-32", "opt-pre-norm-32", "llama-gqa-untied-32", "mistral-sliding", "qwen2-tied", "qwen3"),
    *("gemma", "gemma2-capped-alternating", "gemma3-alternating", "phi3-partial", "stablelm", "falcon-new"),
    *("falcon-alibi", "bloom", "mpt", "gptj", "gpt-neo-alternating", "deepseek-v3", "gemma4-shared", "gpt-oss-moe"),
    *("gemma3n-shared", "gemma4-moe", "qwen3.5", "lfm2", "granite-hybrid", "falcon-h1", "zamba2"),
    *("granite-swa", "ministral3", "granite", "olmo2", "glm4", "cohere2-alternating", "hunyuan-dense"),
)
WITHOUT_ATTENTION = ("MambaForCausalLM", "FalconMambaForCausalLM", "Mamba2ForCausalLM")
NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps")
IN_PARTS = (
    "ernie4.5-moe",
    "phi3-partial",
    "olmo2",
    "glm4",
    "glm4-moe",
    "minimax-m2",
    "cohere-head-norms",
    "phi-moe",
    "gpt-oss-moe",
    "gemma4-shared",
    "gemma4-moe",
    "gemma3n-shared",
)
# Two heads of key in layers with delta rules, or six heads of Mamba 2.
NOT_IN_FOUR = ("qwen3.5", "qwen3-next-moe", "olmo-hybrid", "falcon-h1")
RANKS = [
    (name, size)
    for size in (2, 4)
    for name in (*IN_PARTS, *STATES)
    if name != "zamba2" and (size == 2 or name not in NOT_IN_FOUR)
]


def load(directory: Path, dtype: torch.dtype = torch.float32, model_impl: str = "auto") -> CausalLM:
    return load_model(directory, device=CPU, dtype=dtype, model_impl=model_impl)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The directory of a family or shape, and transformers' model of it, which tests do not change."""

    @functools.cache
    def make(name: str) -> tuple[Path, PreTrainedModel]:
        directory = tmp_path_factory.mktemp(name)
        return directory, make_model(directory, name)

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_however_the_tokens_come(name: str, made: Made) -> None:
    directory, reference = made(name)
    model = load(directory)
    assert isinstance(model, NativeCausalLM) == (name not in FOREIGN)
    assert model.architecture == type(reference).__name__
    assert (model.vocab_size, model.max_model_len) == (VOCAB_SIZE, 512)
    assert model.num_layers == FAMILIES[name].num_calls
    assert_serves_like(reference, model)


# Every eighth in the first two tiers: the code is not ours, and is asked for seldom.
@pytest.mark.parametrize(
    "name", [*(NATIVE if is_third_tier() else [*NATIVE][::8]), "gpt2-80", "llama-gqa-explicit-128"]
)
def test_transformers_code_serves_what_quire_has_code_for(name: str, made: Made) -> None:
    directory, reference = made(name)
    model = load(directory, model_impl="transformers")
    assert not isinstance(model, NativeCausalLM)
    assert_serves_like(reference, model)


@pytest.mark.parametrize("name", [*WITH_IMAGES] if is_third_tier() else [*WITH_IMAGES][::3])
def test_of_a_model_that_reads_images_the_language_model_is_served(name: str, tmp_path: Path) -> None:
    """By the tensor names of transformers 5 and 4, and also by its own code."""
    reference = make_with_images(tmp_path, name)
    assert ModelDirectory.open(tmp_path).whole == type(reference).__name__
    assert_serves_like(reference, load(tmp_path))
    assert_serves_like(reference, load(tmp_path, model_impl="transformers"))
    newer = (("language_model.model.", "model.language_model."), ("language_model.lm_head", "lm_head"))
    for old, new in newer:
        edit_tensors(
            tmp_path, lambda tensors, old=old, new=new: {key.replace(old, new): tensors[key] for key in tensors}
        )
    assert_serves_like(reference, load(tmp_path))


@pytest.mark.parametrize("name", ["deepseek", "plm"])
def test_families_that_transformers_has_no_class_for(name: str, tmp_path: Path) -> None:
    reference = make_remote_model(tmp_path, name)
    assert_serves_like(reference, load(tmp_path))


def test_the_language_model_of_gemma_3n_is_served(tmp_path: Path) -> None:
    """As it is published, where the parts for images and sound are another library's."""
    reference = make_model(tmp_path, "gemma3n-shared")
    edit_tensors(
        tmp_path, lambda tensors: {name.replace("model.", "model.language_model."): tensors[name] for name in tensors}
    )
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert_serves_like(reference, load(tmp_path))


def test_experts_of_one_tensor_may_have_inputs_first(tmp_path: Path) -> None:
    """As Qwen3-VL is published."""
    reference = make_with_images(tmp_path, "qwen3-vl-moe")

    def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
            for name, tensor in tensors.items()
        }

    edit_tensors(tmp_path, transposed)
    assert_serves_like(reference, load(tmp_path, model_impl="native"))


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
def test_older_configurations_have_no_section_for_the_language_model(name: str, tmp_path: Path) -> None:
    reference = make_with_images(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    text = {key: value for key, value in config.pop("text_config").items() if key != "rope_parameters"}
    (tmp_path / "config.json").write_text(json.dumps({**text, **config, **rope}))
    assert_serves_like(reference, load(tmp_path))


def assert_ranks_serve_like(reference: PreTrainedModel, directory: Path, size: int) -> None:
    (sequence,) = make_sequences(60)

    def logits(ranks: Ranks) -> torch.Tensor:
        model = load_model(directory, device=CPU, dtype=torch.float32, ranks=ranks)
        return PagedRunner(model, [sequence], block_size=16).step(Span(0, 0, 60))

    for found in run_ranks(size, logits):
        torch.testing.assert_close(found, expected_logits(reference, sequence), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), RANKS if is_third_tier() else [*{name: (name, size) for name, size in RANKS}.values()]
)
def test_ranks_together_serve_like_one(name: str, size: int, made: Made) -> None:
    """4 ranks share the heads of keys, and groups of heads of Mamba 2."""
    directory, reference = made(name)
    assert_ranks_serve_like(reference, directory, size)


@pytest.mark.parametrize("is_norm_first", [True, False])
def test_ranks_normalize_the_results_of_mamba_2_together(is_norm_first: bool, tmp_path: Path) -> None:
    fields = {"mamba_n_groups": 1, "mamba_norm_before_gate": is_norm_first}
    assert_ranks_serve_like(make_model(tmp_path, "falcon-h1", **fields), tmp_path, 2)


@pytest.mark.parametrize(
    ("name", "fields", "size", "limit", "largest"),
    [
        ("qwen3.5", {}, 4, "this model's 2 heads of key in layers with delta rules", 2),
        ("kimi-linear", {"num_attention_heads": 8, "num_key_value_heads": 8}, 8, "4 heads in layers with delta", 4),
        ("falcon-h1", {"num_attention_heads": 4, "num_key_value_heads": 2}, 4, "6 heads in layers of Mamba 2", 2),
        ("mamba-2", {"n_groups": 4, "num_heads": 24}, 6, "4 groups of heads in this model's layers of Mamba 2, or", 4),
        ("mamba", {}, 3, "this model's 128 inputs in layers of Mamba", 2),
        ("lfm2", {"hidden_size": 64}, 3, "this model's [0-9]+ attention heads", 2),
    ],
)
def test_ranks_that_cannot_have_equal_parts_of_states_are_refused_with_a_number_that_can(
    name: str, fields: dict[str, Any], size: int, limit: str, largest: int
) -> None:
    family, values = DECODERS[f"{FAMILIES[name].name}ForCausalLM"], {**FAMILIES[name].fields, **fields}
    message = f"--tensor-parallel-size is {size}; it must divide .*{limit}.*; use {largest}$"
    with pytest.raises(ConfigurationError, match=message):
        family.from_config(values, Placement(CPU, torch.float32, Ranks(0, size)))
    family.read_config(values).divide(Ranks(0, largest))


def test_blocks_that_layers_share_need_one_rank(tmp_path: Path) -> None:
    make_model(tmp_path, "zamba2")
    message = "--tensor-parallel-size is 2; it must be 1 for a model whose layers share blocks of attention; use 1"
    with pytest.raises(ConfigurationError, match=message):
        load_model(tmp_path, device=CPU, dtype=torch.float32, ranks=Ranks(0, 2))


LONG_ROPE = {
    "original_max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.25, 2.0],
        "long_factor": [1.0, 3.0, 10.0, 30.0],
    },
}

_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("GPT2", {"scale_attn_weights": False, "activation_function": "gelu"}),
    ("GPT2", {"activation_function": "relu", "layer_norm_epsilon": 1e-2}),
    ("OPT", {"activation_function": "gelu", "enable_bias": False}),
    ("OPT", {"layer_norm_elementwise_affine": False}),
    ("OPT", {"_remove_final_layer_norm": True}),
    ("OPT", {"do_layer_norm_before": False}),
    ("Llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-2}),
    ("Llama", {"attention_bias": True}),
    ("Mistral", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}),
    ("Mistral", {"attention_bias": True, "mlp_bias": True}),
    ("Qwen2", {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("Qwen3", {"num_key_value_heads": 4, "rms_norm_eps": 1e-2}),
    ("Gemma", {"head_dim": 20, "hidden_act": "gelu", "attention_bias": True}),
    ("Gemma2", {"head_dim": 16, "sliding_window": 9, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    ("Phi3", LONG_ROPE),
    ("Phi3", {"head_dim": 24}),
    ("Qwen2Moe", {**FEW_EXPERTS, "shared_expert_intermediate_size": 48, "head_dim": 24}),
    ("MiniCPM3", {**WIDE_LATENT, "v_head_dim": 16, "mlp_bias": True}),
    # transformers reads `truncate` only where all layers have one rotation.
    (
        "Olmo3",
        {
            **ALTERNATING,
            "rope_parameters": {
                "full_attention": {**_YARN, "truncate": False},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
]


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_variants_of_the_configuration(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    reference = make_model(tmp_path, Family(family, fields))
    assert_serves_like(reference, load(tmp_path, model_impl="native"))


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("DeepseekV2", {"mlp_bias": True}, "mlp_bias is True; expected false"),
        ("HYV3", {"mlp_bias": True}, "mlp_bias is True; expected false"),
        ("HYV3", {"num_shared_experts": 0}, "num_shared_experts is 0; expected an integer of at least 1"),
        ("Phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok is 3.*; expected 2, the only supported value"),
        ("Phimoe", {"lm_head_bias": True, "tie_word_embeddings": True}, "tie_word_embeddings is True; expected false"),
        ("Ernie4_5_Moe", {"moe_norm_min": 0.5}, "moe_norm_min is 0.5; expected 1e-12, the only supported value"),
        ("Qwen3Next", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected silu, which is the only activation of"),
        ("Zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings is False; expected true"),
        ("GraniteMoeHybrid", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1, because"),
        ("GraniteMoeHybrid", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ("NemotronH", {"mamba_hidden_act": "relu"}, "mamba_hidden_act is 'relu'; expected silu"),
    ],
)
def test_values_that_transformers_computes_in_another_way_are_refused(
    family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DECODERS[f"{family}ForCausalLM"].read_config(fields)


def test_another_name_of_silu_is_read_for_layers_that_keep_a_state(tmp_path: Path) -> None:
    reference = make_model(tmp_path, "qwen3.5", hidden_act="swish")
    assert_serves_like(reference, load(tmp_path))


def test_mistral_with_types_of_layers_has_windows_in_some(tmp_path: Path) -> None:
    """transformers reads such files, of Ministral 8B, by another class."""
    reference = make_model(tmp_path, Family("Ministral", {**ALTERNATING, "head_dim": 16}))
    edit_config(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"])
    assert AutoConfig.from_pretrained(tmp_path).model_type == "ministral"
    assert_serves_like(reference, load(tmp_path, model_impl="native"))


@parametrize_in_turn("name, dtype", HALVED, [(torch.bfloat16,), (torch.float16,)])
def test_half_precision_is_as_close_as_transformers_own(name: str, dtype: torch.dtype, made: Made) -> None:
    directory, reference = made(name)
    (sequence,) = make_sequences(23)
    exact = expected_logits(reference, sequence)
    rounded = copy.deepcopy(reference).to(dtype)  # pyrefly: ignore
    theirs = (expected_logits(rounded, sequence) - exact).abs().mean()
    model = load(directory, dtype)
    assert model.dtype == dtype
    ours = PagedRunner(model, [sequence], block_size=16).step(Span(0, 0, 23))
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.5 * theirs


def test_names_of_fields_in_files_that_older_code_wrote_mean_the_same() -> None:
    read = DECODERS["ExaoneForCausalLM"].read_config
    older = read({"num_layers": 5, "layer_norm_epsilon": 1e-4, "activation_function": "gelu"})
    newer = read({"num_hidden_layers": 5, "rms_norm_eps": 1e-4, "hidden_act": "gelu"})
    for config in (older, newer):
        assert (config.num_layers, config.norm_eps, config.activation) == (5, 1e-4, "gelu")
    read = DECODERS["SarvamMoEForCausalLM"].read_config
    older = read({"num_experts": 16, "num_shared_experts": 2, "use_qkv_bias": True})
    newer = read({"n_routed_experts": 16, "n_shared_experts": 2, "attention_bias": True})
    for config in (older, newer):
        assert config.qkv_bias
        assert config.experts is not None
        assert (config.experts.count, config.experts.shared_inner_size) == (16, 2 * 1024)


def test_what_config_json_does_not_say_without_attention_is_what_transformers_assumes() -> None:
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "activation": "hidden_act",
        "norm_eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings",
    }
    for family in WITHOUT_ATTENTION:
        expected, config = getattr(transformers, family).config_class(), DECODERS[family].read_config({})
        for ours, name in names.items():
            assert getattr(config, ours) == getattr(expected, name), name
        state = config.state
        inner = expected.expand * expected.hidden_size
        if isinstance(state, Mamba2Config):
            assert (state.inner_size, state.head_dim, state.num_groups) == (inner, expected.head_dim, expected.n_groups)
        else:
            assert isinstance(state, MambaConfig)
            assert (state.inner_size, state.step_rank) == (inner, expected.time_step_rank)
        assert (state.state_dim, state.num_taps) == (expected.state_size, expected.conv_kernel)
        assert (state.taps_bias, state.bias) == (expected.use_conv_bias, expected.use_bias)


@pytest.mark.parametrize(
    "family",
    [
        family
        for family in DECODERS
        if family not in ("LlamaForCausalLM", *WITHOUT_ATTENTION) and hasattr(transformers, family)
    ],
)
def test_what_config_json_does_not_say_is_what_transformers_assumes(family: str) -> None:
    # Its default heads do not divide its hidden size.
    fields: dict[str, Any] = {"head_dim": 128} if family == "Glm4MoeForCausalLM" else {}
    fields |= {"num_key_value_heads": 8} if "Nemotron" in family else {}
    # There are no default experts.
    fields |= {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 1} if "Dots1" in family else {}
    if family == "DeepseekV2ForCausalLM":
        fields = {"num_experts_per_tok": 6}
    # By default no layer attends.
    fields |= {"attn_layer_indices": [3]} if family == "BambaForCausalLM" else {}
    types = {"layer_types": ["mamba"] * 31 + ["attention"]} if family == "GraniteMoeHybridForCausalLM" else {}
    # The inner size follows from the field.
    fields |= {"block_auto_adjust_ff_dim": False} if family == "Lfm2ForCausalLM" else types
    expected, config = getattr(transformers, family).config_class(**fields), DECODERS[family].read_config(fields)
    if config.shared is not None:
        assert list(config.shared.layers) == expected.hybrid_layer_ids
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "activation": "hidden_activation" if hasattr(expected, "hidden_activation") else "hidden_act",
        "norm_eps": next((name for name in NORM_EPS if hasattr(expected, name)), ""),
        "tied": "tie_word_embeddings",
    }
    if not config.norm_weights:
        del names["norm_eps"]
    if family == "NemotronHForCausalLM":
        names |= {"activation": "mlp_hidden_act", "norm_eps": "layer_norm_epsilon"}
    if family.startswith("Lfm"):
        assert config.activation == "silu"
        del names["activation"]
    if config.activation == CLAMPED_SWIGLU:
        del names["activation"]
    if "SolarOpen" in family or family in ("Qwen3_5MoeForCausalLM", "LaraMiniForCausalLM"):
        del names["intermediate_size"]
    if config.intermediate_sizes is not None and config.state is not None:
        inner = getattr(expected, "shared_intermediate_size", expected.intermediate_size)
        assert set(config.intermediate_sizes) == {inner}
    elif config.intermediate_sizes is not None:
        del names["intermediate_size"]
        assert list(config.intermediate_sizes) == expected.intermediate_size
        assert config.sparsities == tuple(expected.activation_sparsity_pattern)
    if (altup := config.altup) is not None:
        assert (altup.count, altup.active) == (expected.altup_num_inputs, expected.altup_active_idx)
        assert (altup.laurel_rank, altup.scales_active) == (expected.laurel_rank, expected.altup_correct_scale)
    if config.full_heads is not None:
        of_full_layers = expected.per_layer_config["full_attention"]
        expected.allow_global_per_layer_attribute_access = True
        assert config.full_heads == (of_full_layers.num_key_value_heads, of_full_layers.head_dim)
    if config.per_layer is not None:
        names_of_inputs = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        assert astuple(config.per_layer) == tuple(getattr(expected, name) for name in names_of_inputs)
    assert config.num_shared_layers == getattr(expected, "num_kv_shared_layers", 0)
    head_dim = getattr(expected, "head_dim", None)
    head_dim = expected.hidden_size // expected.num_attention_heads if head_dim is None else head_dim
    if (latent := config.latent) is not None:
        del names["num_kv_heads"]
        head_dim = expected.kv_lora_rank + expected.qk_rope_head_dim
        assert (latent.query_rank, latent.value_dim) == (expected.q_lora_rank, expected.v_head_dim)
        assert (latent.query_dim, latent.bias) == (expected.qk_head_dim, expected.attention_bias)
        assert latent.rotates_neighbours == getattr(expected, "rope_interleave", family == "DeepseekV2ForCausalLM")
    for ours, name in names.items():
        assert getattr(config, ours) == getattr(expected, name), name
    assert config.head_dim == head_dim
    assert config.rope.max_positions == config.max_model_len == expected.max_position_embeddings
    # Nemotron-H rotates nothing.
    ropes = getattr(expected, "rope_parameters", {"rope_theta": 1e4})
    assert config.rope.theta == ropes.get("full_attention", ropes)["rope_theta"]
    if config.sliding_rope is not None:
        assert config.sliding_rope.theta == ropes["sliding_attention"]["rope_theta"]
    # Qwen2-MoE has 0 for no window.
    window = getattr(expected, "sliding_window", None) or None
    types = getattr(expected, "layer_types", None) or ["sliding_attention"] * expected.num_hidden_layers
    assert config.sliding_windows == tuple(window if each == "sliding_attention" else None for each in types)
    if (experts := config.experts) is not None:
        names = ("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
        count, other, chosen, inner, normalized = (getattr(expected, name, None) for name in names)
        chosen = chosen or expected.moe_topk
        assert (experts.count, experts.num_chosen) == (count or other, chosen)
        assert (experts.inner_size, experts.normalized) == (
            inner or expected.intermediate_size,
            normalized is not False and experts.scoring is not Scoring.SPARSE_MIXER and "Jamba" not in family,
        )
        names = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")
        num_shared = next((getattr(expected, name) for name in names if hasattr(expected, name)), 0)
        shared = getattr(expected, "shared_expert_intermediate_size", num_shared * (inner or 0) or None)
        shared = getattr(expected, "shared_intermediate_size", shared) if config.state is not None else shared
        assert experts.shared_inner_size == (config.intermediate_size if "HunYuan" in family else shared)
    if (scale := getattr(expected, "query_pre_attn_scalar", None)) is not None:
        assert config.attention_scale == scale**-0.5
        assert config.logit_cap == expected.final_logit_softcapping
    base = getattr(expected, "dim_model_base", expected.hidden_size)
    assert config.logit_scale == getattr(expected, "logit_scale", base / expected.hidden_size)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_sliding_window": 1}, "use_sliding_window is 1; expected true or false"),
        ({"layer_types": ["full_attention"]}, "expected 2 of full_attention and sliding_attention"),
        ({"layer_types": "full_attention"}, "expected 2 of full_attention and"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": False},
            "expected only full_attention if no sliding window is used",
        ),
    ],
)
def test_windows_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    config = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 7, **fields}
    with pytest.raises(ConfigurationError, match=message):
        DECODERS["Qwen2ForCausalLM"].from_config(config, Placement(CPU, torch.float32))


def test_gemma_3_as_transformers_4_wrote_it() -> None:
    written: dict[str, Any] = {
        "num_hidden_layers": 7,
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    expected, config = Gemma3TextConfig(**written), DECODERS["Gemma3ForCausalLM"].read_config(written)
    assert config.sliding_rope is not None
    for rope, kind in ((config.rope, "full_attention"), (config.sliding_rope, "sliding_attention")):
        section = expected.rope_parameters[kind]
        assert (rope.rope_type, rope.theta) == (section["rope_type"], section["rope_theta"])
    assert config.rope.fields.number("factor") == 8
    # The maximum length is that of the scaled rotation.
    assert config.max_model_len == expected.max_position_embeddings
    assert [window is not None for window in config.sliding_windows] == [
        kind == "sliding_attention" for kind in expected.layer_types or ()
    ]


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "Mixtral",
            {"num_local_experts": 3, "num_experts_per_tok": 4},
            "num_experts_per_tok is 4; expected at",
        ),
        (
            "Mixtral",
            {"num_local_experts": 10**9},
            "num_experts is 1000000000; expected at most 65536 in 2 layers",
        ),
        ("Qwen3Moe", {**EXPERTS, "mlp_only_layers": ["1"]}, "expected a list of layers"),
        ("Qwen2Moe", {**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (
            "Gemma",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention is True; expected false",
        ),
        (
            "Gemma2",
            {"sliding_window": None, "layer_types": ["sliding_attention"] * 2},
            "expected only full_attention if no sliding window is used",
        ),
        (
            "Gemma3",
            {"rope_parameters": {"rope_theta": 1e4}},
            "expected sections for full_attention and sliding_",
        ),
        ("Gemma3", {"rope_parameters": {"full_attention": 3}}, "expected a section for each kind of layer"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected at most 1"),
        ("Phi3", {"partial_rotary_factor": 0.01}, "for an even number of 96 dimensions"),
        (
            "Phi3",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type is 'yarn'; expected default or longrope",
        ),
        ("Llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1"),
    ],
)
def test_what_a_family_cannot_be_is_refused(family: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DECODERS[f"{family}ForCausalLM"].read_config({"num_hidden_layers": 2, **fields})


def test_native_alone_refuses_what_transformers_would_serve(tmp_path: Path) -> None:
    make_model(tmp_path, "gptj")
    with pytest.raises(ConfigurationError, match=r"GPTJForCausalLM of .* is not one of Quire's own, GPT2LMHeadModel"):
        load(tmp_path, model_impl="native")
