"""A model as the metadata of a GGUF file: the fields that `gguf_model` and `gguf_tokenizer` read, as llama.cpp's
converter names them. Losses are found by reading the file back and comparing it with the model."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from quire.model_files.gguf_config import llama_3_factors
from quire.model_files.gguf_header import GgufFields, GgufHeader
from quire.model_files.gguf_model import SAMPLING, describe
from quire.model_files.gguf_tokenizer import SPLIT_NAMES, tokenizer_of
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError

_ARCHITECTURES = {
    **dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"), "llama"),
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "GPT2LMHeadModel": "gpt2",
}
_NUMBERS = {
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
# Fields that have several forms (rotations are refused when they are written), or may be null and follow from others.
_NOT_COMPARED = {
    "architectures",
    "model_type",
    "dtype",
    "eos_token_id",
    "rope_scaling",
    "rope_theta",
    "rope_parameters",
    "partial_rotary_factor",
    "pad_token_id",
}
_NULL = {"head_dim", "num_key_value_heads", "n_inner", "bos_token_id"}
_OF_YARN = {
    "original_max_position_embeddings": "original_context_length",
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
_LONG_ROPE = ("longrope", "su")
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
# The tokens of these texts identify the way in which a tokenizer splits; the second group decides between equals.
_TEXTS = (
    "The cats aren't 12345 years old,\t  WE'LL see!\n\n\n x = a_b[3] + fooBar(\"y\")...",
    " caf\u00e9 \u4e2d\u6587\u5b57\r\n ",
)
_RARE_TEXTS = (
    "\u0661\u0662\u0663 \u00bd",
    "e\u0301 \uac00",
    "a\u2028b\u3000c",
    "it\u2019s \U0001f600\U0001f3fd",
    "'S 'Re",
)


def metadata_of(model: ModelDirectory) -> dict[str, Any]:
    """Raises ConfigurationError for an architecture, a rotation or a tokenizer that files do not have."""
    config, architecture = model.config, _ARCHITECTURES.get(model.architecture)
    if architecture is None:
        raise _error(
            model, f"{model.architecture} is not written to GGUF files; written are {', '.join(_ARCHITECTURES)}"
        )
    numbers = {key: next((config[name] for name in names if config.get(name)), None) for key, names in _NUMBERS.items()}
    if not config.get("use_sliding_window", not architecture.startswith("qwen")):
        numbers["attention.sliding_window"] = None
    if architecture == "gpt2":
        numbers["feed_forward_length"] = numbers["feed_forward_length"] or 4 * config["n_embd"]
    else:
        numbers |= _rotation(model)
    given = model.generation_defaults | (
        {"temperature": 0.0} if model.generation_config.get("do_sample") is False else {}
    )
    fields = {"general.architecture": architecture, "general.type": "model", "general.name": model.name}
    fields |= {f"{architecture}.{key}": value for key, value in numbers.items()}
    for key, name in ((key, name) for key, name in SAMPLING.items() if given.get(name) is not None):
        fields[f"general.sampling.{key}"] = int(given[name]) if key == "top_k" else float(given[name])
    return _with_tokenizer(model, {key: value for key, value in fields.items() if value is not None})


def check_read_back(model: ModelDirectory, header: GgufHeader) -> Mapping[str, Any]:
    """The configuration that is read from the header. Raises ConfigurationError if it is another model's."""
    described = describe(header)
    for key, value in described.config.items():
        expected = model.config.get(key, value)
        if key not in _NOT_COMPARED and expected != value and not (expected is None and key in _NULL):
            raise _error(model, f"{key} is {expected!r:.80}, and a GGUF file of such a model means {value!r:.80}")
    if missing := sorted(set(model.eos_token_ids) - set(described.eos_token_ids)):
        raise _error(model, f"a GGUF file cannot say that each of the tokens {missing} ends a text")
    return described.config


def rotation_factors(model: ModelDirectory) -> Mapping[str, Sequence[float]]:
    """Divisors of frequencies, by the names of tensors of the file; empty if fields are enough."""
    rope = _rope_section(model.config)
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _LONG_ROPE:
        return {f"rope_factors_{each}.weight": rope[f"{each}_factor"] for each in ("long", "short")}
    if kind != "llama3":
        return {}
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factors = llama_3_factors(_theta(model.config), _head_dim(model.config), *(rope[name] for name in names))
    return {"rope_freqs.weight": list(factors)}


def _error(model: ModelDirectory, problem: str) -> ConfigurationError:
    return ConfigurationError(f"{model.path}: {problem}")


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return section.get("full_attention", section)


def _theta(config: Mapping[str, Any]) -> float:
    return float(_rope_section(config).get("rope_theta", config.get("rope_theta", 10_000.0)))


def _rotation(model: ModelDirectory) -> dict[str, Any]:
    config, rope, size = model.config, _rope_section(model.config), _head_dim(model.config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    rotated = int(size * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    fields: dict[str, Any] = {"rope.freq_base": _theta(config), "rope.dimension_count": rotated}
    fields |= {"attention.key_length": size, "attention.value_length": size}
    if of_windows := (config.get("rope_parameters") or {}).get("sliding_attention"):
        if of_windows.get("rope_type", "default") != "default":
            raise _error(model, f"rotations as {dict(of_windows)!r:.200} are not written to GGUF files for windows")
        fields["rope.freq_base_swa"] = float(of_windows["rope_theta"])
        fields["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
    if model.architecture == "Phi3ForCausalLM":
        original, length = config.get("original_max_position_embeddings", 4096), config["max_position_embeddings"]
        fields["rope.scaling.original_context_length"] = original
        if kind in _LONG_ROPE:
            growth = math.log(max(rope.get("factor") or length / original, 1)) / math.log(original)
            return fields | {"rope.scaling.attn_factor": float(rope.get("attention_factor") or math.sqrt(1 + growth))}
    if kind in ("default", "llama3"):
        return fields
    names = {"factor": "factor"} | (_OF_YARN if kind == "yarn" else {})
    if kind not in ("linear", "yarn") or rope.keys() - {"rope_type", "type", "rope_theta", *names}:
        raise _error(model, f"rotations as {dict(rope)!r:.200} are not written to GGUF files")
    fields["rope.scaling.type"] = kind
    given = {key: rope[name] for name, key in names.items() if name in rope}
    return fields | {f"rope.scaling.{key}": given[key] if "length" in key else float(given[key]) for key in given}


def _with_tokenizer(model: ModelDirectory, fields: Mapping[str, Any]) -> dict[str, Any]:
    content = model.tokenizer()
    bpe: Mapping[str, Any] = content["model"]
    if bpe["type"] != "BPE":
        raise _error(model, f"a tokenizer of the type {bpe['type']!r:.80} is not written to GGUF files, only BPE is")
    size = max(model.config["vocab_size"], 1 + max(bpe["vocab"].values()))
    tokens, kinds = [f"[PAD{index}]" for index in range(size)], [_UNUSED] * size
    for token, index in bpe["vocab"].items():
        is_byte = bpe["byte_fallback"] and len(token) == 6 and token.startswith("<0x")
        tokens[index], kinds[index] = token, _BYTE if is_byte else _NORMAL
    # Some tokenizers have one more to pad with than the model has vectors for.
    for each in (each for each in content["added_tokens"] if each["id"] < size):
        tokens[each["id"]], kinds[each["id"]] = each["content"], _CONTROL if each["special"] else _USER_DEFINED
    own = tokenizers.Tokenizer.from_str(json.dumps(content))
    plain, around = (own.encode("a", add_special_tokens=each).ids for each in (False, True))
    has_bos, has_eos = around[0] != plain[0], around[-1] != plain[-1]
    special = {name: model.tokenizer_config.get(f"{name}_token") for name in ("bos", "unk", "pad")}
    ids = {
        name: own.token_to_id(each["content"] if isinstance(each, dict) else each)
        for name, each in special.items()
        if each
    }
    ids["bos"] = around[0] if has_bos else ids.get("bos", model.config.get("bos_token_id"))
    ends = dict.fromkeys([around[-1], *model.eos_token_ids] if has_eos else model.eos_token_ids)
    ids |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    names = {"unk": "unknown", "pad": "padding"}
    found = {
        **fields,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        **{
            f"tokenizer.ggml.{names.get(name, name)}_token_id": index
            for name, index in ids.items()
            if index is not None and index < size
        },
        "tokenizer.ggml.add_bos_token": has_bos,
        "tokenizer.ggml.add_eos_token": has_eos,
    }
    templates = {"": model.chat_template, ".tool_use": model.tool_chat_template}
    found |= {f"tokenizer.chat_template{name}": text for name, text in templates.items() if text is not None}
    merges = [each if isinstance(each, str) else " ".join(each) for each in bpe["merges"]]
    if bpe["byte_fallback"]:
        ranks = {each.replace(" ", ""): -float(rank) for rank, each in reversed([*enumerate(merges)])}
        found |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [ranks.get(each, -1e6) for each in tokens]}
        if "unk" in ids:
            kinds[ids["unk"]] = _UNKNOWN
        return _best(model, own, found, "tokenizer.ggml.add_space_prefix", (True, False))
    found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": merges}
    return _best(model, own, found, "tokenizer.ggml.pre", SPLIT_NAMES)


def _best(
    model: ModelDirectory, own: tokenizers.Tokenizer, fields: dict[str, Any], key: str, values: tuple[Any, ...]
) -> dict[str, Any]:
    """The fields with the value that gives the tokens of the model's own tokenizer. ConfigurationError without one."""
    best, num_equal = None, -1
    for value in values:
        tried = fields | {key: value}
        read = tokenizer_of(GgufFields(GgufHeader(model.path, tried, {})), fields["tokenizer.ggml.tokens"])
        other = tokenizers.Tokenizer.from_str(json.dumps(read))
        equal = [own.encode(text).ids == other.encode(text).ids for text in (*_TEXTS, *_RARE_TEXTS)]
        if all(equal[: len(_TEXTS)]) and sum(equal) > num_equal:
            best, num_equal = tried, sum(equal)
        if all(equal):
            break
    if best is None:
        raise _error(model, "its tokenizer splits texts in a way that no GGUF file says; it cannot be written")
    return best
