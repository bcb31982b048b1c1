"""A GGUF file as a model: config.json, tokenizer.json and the rest, in the form that transformers' directories have.

Nothing is written to disk: `ModelDirectory` takes the result of `describe` as the content of those files. Weights are
read by the worker (`worker_svc.gguf_weights`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.model_files.architectures import ARCHITECTURES, ENCODERS, RANKERS
from quire.model_files.gguf_config import num_layers
from quire.model_files.gguf_encoders import ENCODER_CONFIGS, ranks
from quire.model_files.gguf_families import CONFIGS, WITHOUT_ATTENTION
from quire.model_files.gguf_header import GgufFields, GgufHeader, GgufTensor
from quire.model_files.gguf_tokenizer import ends_of_turns, tokenizer_of
from quire.runtime.settings import ConfigurationError

_OUTPUT = "output.weight"
_EMBEDDING = "token_embd.weight"
_F32, _F16 = 0, 1
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_TOKENS = ("eos", "eot", "eom")
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Fields of general.sampling, which converters take from generation_config.json, by the names that they have there."""
_NOT_MODELS = {
    "mmproj": "the part of a model that reads images or sound, which Quire does not; name that of the language model",
    "adapter": "an adapter (LoRA), not a model; Quire serves only models",
    "imatrix": "an importance matrix, from which quantized files are made, not a model",
}


@dataclass(frozen=True, slots=True)
class GgufDescription:
    """The contents of the files that a model directory would have."""

    header: GgufHeader
    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tokenizer: Mapping[str, Any]
    """The content of tokenizer.json, with merges as tuples."""
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]
    """By name, as in a directory: "default", "tool_use"."""


def describe(header: GgufHeader) -> GgufDescription:
    """The description by a header that has been read, or will be written. Raises ConfigurationError, one line, for
    unsupported models."""
    kind = header.metadata.get("general.type")
    if isinstance(kind, str) and kind in _NOT_MODELS:
        raise ConfigurationError(f"{header.path} is {_NOT_MODELS[kind]}")
    fields = GgufFields(header)
    config = _config(fields)
    tokens = fields.texts("tokenizer.ggml.tokens")
    tokenizer = tokenizer_of(fields, tokens)
    eos = _ends_of_text(fields, tokenizer["added_tokens"], ends_of_turns(tokens))
    tokenizer_config: dict[str, Any] = {
        key: tokens[token_id] for key, name in _NAMED_TOKENS.items() if (token_id := fields.token_id(name)) is not None
    }
    templates = {"default": header.metadata.get("tokenizer.chat_template")}
    templates["tool_use"] = header.metadata.get("tokenizer.chat_template.tool_use")
    return GgufDescription(
        header=header,
        config=config | {"eos_token_id": list(eos), "bos_token_id": fields.token_id("bos")},
        generation_config=_generation_config(fields),
        tokenizer_config=tokenizer_config,
        tokenizer=tokenizer,
        eos_token_ids=eos,
        chat_templates={name: text for name, text in templates.items() if isinstance(text, str)},
    )


def _ends_of_text(
    fields: GgufFields, added_tokens: Sequence[Mapping[str, Any]], ends: Collection[str]
) -> tuple[int, ...]:
    named = [token_id for name in _END_TOKENS if (token_id := fields.token_id(name)) is not None]
    turns = [token["id"] for token in added_tokens if token["content"] in ends]
    return tuple(dict.fromkeys([*named, *turns]))


def _generation_config(fields: GgufFields) -> dict[str, Any]:
    given = {name: fields.shared(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: value for name, value in given.items() if value is not None}


# config.json


def _config(fields: GgufFields) -> dict[str, Any]:
    make = {**CONFIGS, **ENCODER_CONFIGS}.get(fields.architecture)
    if make is None:
        known = ", ".join((*CONFIGS, *ENCODER_CONFIGS))
        raise fields.error(
            f"architecture {fields.architecture!r:.80} of GGUF files is not read; Quire reads {known}; "
            "docs/models.md says which others are served from a directory as transformers saves it"
        )
    if not fields.header.tensors:
        raise fields.error("it has no tensors, only a vocabulary")
    embedding = fields.header.tensors.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise fields.error(f"tensor {_EMBEDDING} is missing, or no matrix")
    _check_sizes(fields, embedding)
    shared = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": _OUTPUT not in fields.header.tensors,
        "dtype": _dtype(fields),
    }
    config = make(fields) | shared
    architecture = ARCHITECTURES.get(str(config["model_type"]), "")
    if fields.architecture in ENCODER_CONFIGS:
        kinds = RANKERS if ranks(fields.header) else ENCODERS
        architecture = next(name for name, kind in kinds.items() if kind == config["model_type"])
    return {"architectures": [architecture], **config}


def _check_sizes(fields: GgufFields, embedding: GgufTensor) -> None:
    """Takes sizes and counts from the tensors, so that a damaged number does not exhaust memory."""
    width = fields.size("embedding_length")
    if width != embedding.shape[1]:
        raise fields.error(f"embedding_length is {width}, and {_EMBEDDING} has {embedding.shape[1]} columns")
    numbers = {name.split(".")[1] for name in fields.header.tensors if name.startswith("blk.")}
    # Files may lack the last layers, which draft tokens.
    count = fields.size("block_count")
    if len(numbers) not in (num_layers(fields), count) or str(len(numbers) - 1) not in numbers:
        raise fields.error(f"block_count is {count}, and it has the tensors of {len(numbers)} layers")
    is_encoder = fields.architecture in ENCODER_CONFIGS
    if not is_encoder and not fields.flag(f"{fields.architecture}.attention.causal", True):
        raise fields.error("its tokens attend to later ones, as in a model of embeddings; such models are not served")
    if fields.architecture in WITHOUT_ATTENTION:
        return
    heads = fields.size("attention.head_count")
    tensors = fields.header.tensors
    # Layers that keep a state have no query, but some have a tensor with the name of query, key and value.
    queries = (f"blk.{index}.{name}" for name in ("attn_q", "attn_qkv", "attn_q_b") for index in range(len(numbers)))
    query = next((tensors[each] for name in queries if (each := f"{name}.weight") in tensors), None)
    head_dim = fields.size("attention.key_length_mla", fields.size("attention.key_length", max(width // heads, 1)))
    # The first layer has a window, if some have.
    head_dim = min(head_dim, fields.size("attention.key_length_swa", head_dim))
    if query is None or heads * head_dim > query.shape[0]:
        raise fields.error("tensor blk.0.attn_q.weight is missing, or has not as many rows as all heads together")


def _dtype(fields: GgufFields) -> str:
    """The dtype of the matrices; experts' gates and all vectors are float32 in any file."""
    kinds = {tensor.ggml_type for tensor in fields.header.tensors.values() if len(tensor.shape) > 1}
    if kinds == {_F32}:
        return "float32"
    return "float16" if kinds <= {_F32, _F16} else "bfloat16"
