"""A GGUF file as a model: config.json, tokenizer.json and the rest, in the form that transformers' directories have.

Nothing is written to disk: `ModelDirectory` takes what `describe` returns for the content of those files. Weights are
read by the worker (`worker_svc.gguf_weights`).
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.gguf_header import GgufHeader
from quire.settings import ConfigurationError

_OUTPUT = "output.weight"
_ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_F32, _F16 = 0, 1
# Types of tokens.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "\u2581"
_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_TOKENS = ("eos", "eot", "eom")

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_DIGITS = r"\p{N}"
_SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
}
"""How byte-level vocabularies split text, by tokenizer.ggml.pre; None, and what is between digits, as GPT-2 does."""
_NORMALIZED = ("qwen2", "deepseek-r1-qwen")
_WITH_BOS = ("llama-bpe", "llama3", "llama-v3")
"""Those that put the first token before a text, unless the file says otherwise; and all of SentencePiece."""


@dataclass(frozen=True, slots=True)
class GgufDescription:
    """The contents of the files that a model directory would have."""

    config: dict[str, Any]
    tokenizer_config: dict[str, Any]
    tokenizer: bytes
    """Of tokenizer.json."""
    eos_token_ids: tuple[int, ...]
    chat_templates: dict[str, str]
    """By name, as in a directory: "default", "tool_use"."""


def describe(path: Path) -> GgufDescription:
    """Raises ConfigurationError, one line, for a damaged file and for what is not read."""
    header = GgufHeader.read(path)
    fields = _Fields(header)
    eos = tuple(dict.fromkeys(token_id for name in _END_TOKENS if (token_id := fields.token_id(name)) is not None))
    tokens = fields.texts("tokenizer.ggml.tokens")
    tokenizer_config: dict[str, Any] = {
        key: tokens[token_id] for key, name in _NAMED_TOKENS.items() if (token_id := fields.token_id(name)) is not None
    }
    templates = {"default": header.metadata.get("tokenizer.chat_template")}
    templates["tool_use"] = header.metadata.get("tokenizer.chat_template.tool_use")
    return GgufDescription(
        config=_config(fields) | {"eos_token_id": list(eos), "bos_token_id": fields.token_id("bos")},
        tokenizer_config=tokenizer_config,
        tokenizer=json.dumps(_tokenizer(fields, tokens), ensure_ascii=False).encode(),
        eos_token_ids=eos,
        chat_templates={name: text for name, text in templates.items() if isinstance(text, str)},
    )


class _Fields:
    """The metadata of a file, checked as it is read; errors name the file."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.architecture = self.text("general.architecture")

    def error(self, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self.header.path}: {problem}")

    def text(self, key: str) -> str:
        return self._typed(key, str, "a text")

    def texts(self, key: str) -> list[str]:
        values = self._typed(key, list, "a list of texts")
        if not all(isinstance(value, str) for value in values):
            raise self.error(f"{key} is not a list of texts")
        return values

    def own(self, name: str, kind: type | tuple[type, ...] = int, default: Any = None) -> Any:
        """A field of the architecture: "block_count" is llama.block_count."""
        key = f"{self.architecture}.{name}"
        return self._typed(key, kind, "a number") if key in self.header.metadata or default is None else default

    def number(self, name: str, default: float | None = None) -> float:
        return self.own(name, (int, float), default)

    def has(self, name: str) -> bool:
        return f"{self.architecture}.{name}" in self.header.metadata

    def token_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.header.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(self.texts("tokenizer.ggml.tokens")):
            raise self.error(f"{key} is {value!r:.80}, which is no token of the vocabulary")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return self._typed(key, bool, "true or false") if key in self.header.metadata else default

    def _typed(self, key: str, kind: type | tuple[type, ...], expected: str) -> Any:
        value = self.header.metadata.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            said = "missing" if value is None else f"{value!r:.80}, not {expected}"
            raise self.error(f"{key} is {said}")
        return value


# config.json


def _config(fields: _Fields) -> dict[str, Any]:
    make = _CONFIGS.get(fields.architecture)
    if make is None:
        raise fields.error(
            f"architecture {fields.architecture} of GGUF files is not read; read are {', '.join(_CONFIGS)}; "
            "others are served from a directory as transformers saves it"
        )
    if fields.own("expert_count", default=0):
        raise fields.error("models with experts are not read from GGUF files, only from a directory of transformers'")
    tensors = fields.header.tensors
    if _EMBEDDING not in tensors:
        raise fields.error(f"tensor {_EMBEDDING} is missing")
    matrices = {tensor.ggml_type for tensor in tensors.values() if len(tensor.shape) > 1}
    dtype = (
        {_F32: "float32", _F16: "float16"}.get(next(iter(matrices)), "bfloat16") if len(matrices) == 1 else "bfloat16"
    )
    shared = {
        "vocab_size": tensors[_EMBEDDING].shape[0],
        "tie_word_embeddings": _OUTPUT not in tensors,
        "dtype": dtype,
    }
    return make(fields) | shared


def _llama_like(architecture: str, model_type: str) -> Callable[[_Fields], dict[str, Any]]:
    def make(fields: _Fields) -> dict[str, Any]:
        heads, width = fields.own("attention.head_count"), fields.own("embedding_length")
        head_dim = fields.own("attention.key_length", default=width // max(heads, 1))
        rotated = fields.own("rope.dimension_count", default=head_dim)
        if rotated != head_dim or fields.own("attention.value_length", default=head_dim) != head_dim:
            raise fields.error(f"heads of {head_dim} with {rotated} rotated dimensions are not read")
        window: dict[str, Any] = {}
        if fields.has("attention.sliding_window"):
            if model_type != "llama":
                raise fields.error(f"sliding windows of {model_type} are not read")
            window = {"architectures": ["MistralForCausalLM"], "sliding_window": fields.own("attention.sliding_window")}
        return {
            "architectures": [architecture],
            "model_type": model_type,
            "hidden_size": width,
            "intermediate_size": fields.own("feed_forward_length"),
            "num_hidden_layers": fields.own("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields.own("attention.head_count_kv", default=heads),
            "head_dim": head_dim,
            "max_position_embeddings": fields.own("context_length"),
            "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
            "hidden_act": "silu",
            "rope_theta": fields.number("rope.freq_base", 10_000.0),
            "rope_scaling": _rope_scaling(fields, head_dim),
            "attention_bias": "blk.0.attn_q.bias" in fields.header.tensors,
            **window,
        }

    return make


def _gpt2(fields: _Fields) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": fields.own("embedding_length"),
        "n_inner": fields.own("feed_forward_length"),
        "n_layer": fields.own("block_count"),
        "n_head": fields.own("attention.head_count"),
        "n_positions": fields.own("context_length"),
        "layer_norm_epsilon": fields.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_CONFIGS: dict[str, Callable[[_Fields], dict[str, Any]]] = {
    "llama": _llama_like("LlamaForCausalLM", "llama"),
    "mistral": _llama_like("LlamaForCausalLM", "llama"),
    "qwen2": _llama_like("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _llama_like("Qwen3ForCausalLM", "qwen3"),
    "gpt2": _gpt2,
}


def _rope_scaling(fields: _Fields, head_dim: int) -> dict[str, Any] | None:
    kind = fields.own("rope.scaling.type", str, "none")
    if _ROPE_FACTORS in fields.header.tensors:
        return _llama3_scaling(fields, head_dim)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.error(f"rope.scaling.type is {kind}; read are none, linear and yarn")
    scaling = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.own("rope.scaling.original_context_length")
    return scaling


_LLAMA_3_LOW, _LLAMA_3_HIGH, _LLAMA_3_LENGTH = 1.0, 4.0, 8192


def _llama3_scaling(fields: _Fields, head_dim: int) -> dict[str, Any]:
    """The parameters behind the factors of Llama 3.1 and later, which a file has in place of them.

    Their greatest one is the factor; the other parameters are the same in all of these models, which is checked.
    """
    stored = _read_floats(fields, _ROPE_FACTORS)
    factor, theta = max(stored, default=1.0), fields.number("rope.freq_base", 10_000.0)
    expected = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = (_LLAMA_3_LENGTH / wavelength - _LLAMA_3_LOW) / (_LLAMA_3_HIGH - _LLAMA_3_LOW)
        smooth = min(max(smooth, 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if len(stored) != len(expected) or any(abs(a - b) > 1e-3 * b for a, b in zip(stored, expected, strict=True)):
        raise fields.error(f"{_ROPE_FACTORS} has other factors than Llama 3.1 and later have; they are not read")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA_3_LOW,
        "high_freq_factor": _LLAMA_3_HIGH,
        "original_max_position_embeddings": _LLAMA_3_LENGTH,
    }


def _read_floats(fields: _Fields, name: str) -> Sequence[float]:
    tensor = fields.header.tensors[name]
    if tensor.ggml_type != _F32:
        raise fields.error(f"{name} is not in float32")
    count = math.prod(tensor.shape)
    with fields.header.path.open("rb") as file:
        file.seek(tensor.start)
        return memoryview(file.read(4 * count)).cast("f").tolist()


# tokenizer.json


def _tokenizer(fields: _Fields, tokens: Sequence[str]) -> dict[str, Any]:
    kind = fields.text("tokenizer.ggml.model")
    kinds = fields.header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type does not have an entry for each token")
    if kind == "gpt2":
        parts = _byte_level(fields, tokens)
        with_bos = fields.text("tokenizer.ggml.pre") in _WITH_BOS
    elif kind == "llama":
        parts = _sentence_piece(fields, tokens, kinds)
        with_bos = True
    else:
        raise fields.error(f"tokenizer.ggml.model is {kind}; read are gpt2 (byte-level BPE) and llama (SentencePiece)")
    bos, eos = fields.token_id("bos"), fields.token_id("eos")
    before = bos if fields.flag("tokenizer.ggml.add_bos_token", with_bos) else None
    after = eos if fields.flag("tokenizer.ggml.add_eos_token", False) else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, kinds),
        **parts,
        "post_processor": _post_processor(tokens, before, after),
    }


def _added_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": token, **plain, "special": kind != _USER_DEFINED}
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(tokens: Sequence[str], before: int | None, after: int | None) -> dict[str, Any] | None:
    if before is None and after is None:
        return None
    around = {tokens[token_id]: token_id for token_id in (before, after) if token_id is not None}

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for type_id, name in enumerate(sequences):
            inner = [{"Sequence": {"id": name, "type_id": type_id}}]
            for token_id, place in ((before, 0), (after, 2)):
                if token_id is not None:
                    inner.insert(place, {"SpecialToken": {"id": tokens[token_id], "type_id": type_id}})
            parts += inner
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in around.items()
        },
    }


def _byte_level(fields: _Fields, tokens: Sequence[str]) -> dict[str, Any]:
    pre = fields.text("tokenizer.ggml.pre")
    if pre not in _SPLITS:
        raise fields.error(f"tokenizer.ggml.pre is {pre}; read are {', '.join(_SPLITS)}")
    split = _SPLITS[pre]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": split in (None, _DIGITS),
    }
    steps: list[dict[str, Any]] = [byte_level]
    if split is not None:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False})
    merges = [merge.split(" ") for merge in fields.texts("tokenizer.ggml.merges")]
    return {
        "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": _bpe(tokens, merges, ignore_merges=pre in _WITH_BOS),
    }


def _sentence_piece(fields: _Fields, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    scores = fields.header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise fields.error("tokenizer.ggml.scores does not have an entry for each token")
    with_prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = fields.token_id("unknown")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if with_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    if with_prefix:
        # Before a text that begins with a space, too: as SentencePiece and llama.cpp do.
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges_of(tokens, scores, kinds),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_of(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, which has a score for each token instead: a pair is merged before
    another one if the token that it makes has the higher score."""
    is_text = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (_UNKNOWN, _CONTROL)}
    places = {token: place for place, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token not in is_text:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in is_text and right in is_text:
                found.append((-score, -len(left), -len(right), places[left], left, right))
    found.sort(key=lambda merge: merge[:4])
    return [(left, right) for *_, left, right in found]


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **further: Any) -> Mapping[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": merges,
        **further,
    }
