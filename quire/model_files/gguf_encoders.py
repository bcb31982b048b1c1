"""GGUF files of encoders: their config.json, and how they make the vector of a text."""

from typing import Any

from quire.model_files.gguf_config import LAYER_NORM_EPS, RMS_EPS, SLIDING, Config, has_bias, row, windows
from quire.model_files.gguf_header import GgufFields, GgufHeader

_POOLING = "pooling_type"
_MODES = {1: "mean", 2: "cls", 3: "lasttoken"}
_RANK = 4
_HEAD = ("cls.weight", "cls.output.weight")
_TYPES, _PLACES = "token_types.weight", "position_embd.weight"
_DENSE = ("dense_2.weight", "dense_3.weight")


def pooling_of(header: GgufHeader) -> str:
    """The mode of pooling, as sentence-transformers names it. Raises ConfigurationError for another one."""
    fields = GgufFields(header)
    kind = fields.own(_POOLING, int, "a whole number", 1)
    if kind not in _MODES:
        expected = ", ".join(f"{number} ({mode})" for number, mode in _MODES.items())
        raise fields.error(f"{fields.architecture}.{_POOLING} is {kind}; supported are {expected}")
    return _MODES[kind]


def ranks(header: GgufHeader) -> bool:
    """Whether the model scores pairs of texts, as one with a head does if no kind of pooling is given. Raises
    ConfigurationError for one whose scores are not read."""
    fields = GgufFields(header)
    without = _RANK if _HEAD[-1] in header.tensors else 1
    if fields.own(_POOLING, int, "a whole number", without) != _RANK:
        return False
    if fields.architecture != "bert" or not header.tensors.keys() >= set(_HEAD):
        raise fields.error(
            f"it ranks documents, which GGUF files of bert with the tensors {' and '.join(_HEAD)} can, as llama.cpp "
            "writes them of RoBERTa and XLM-RoBERTa; use the directory that it was made of"
        )
    return True


def dense_of(header: GgufHeader) -> list[tuple[str, tuple[int, ...]]]:
    """The linear layers behind pooling: their tensors, and shapes [out, in]."""
    found = [(name, header.tensors[name].shape) for name in _DENSE if name in header.tensors]
    for name, shape in found:
        if len(shape) != 2:
            raise GgufFields(header).error(f"tensor {name} has shape {list(shape)}; expected a matrix")
    return found


def _encoder(fields: GgufFields, model_type: str, **further: Any) -> Config:
    types = fields.header.tensors.get(_TYPES)
    return {
        "model_type": model_type,
        "hidden_size": fields.size("embedding_length"),
        "intermediate_size": fields.size("feed_forward_length"),
        "num_hidden_layers": fields.size("block_count"),
        "num_attention_heads": fields.size("attention.head_count"),
        "max_position_embeddings": fields.size("context_length"),
        "layer_norm_eps": fields.positive(LAYER_NORM_EPS),
        "type_vocab_size": 0 if types is None else types.shape[0],
        **further,
    }


def _bert(fields: GgufFields) -> Config:
    """BERT, and RoBERTa, whose converter leaves out the positions before the first token's."""
    places = fields.header.tensors.get(_PLACES)
    if places is None:
        raise fields.error(f"tensor {_PLACES} is missing")
    return _encoder(fields, "bert", max_position_embeddings=places.shape[0])


def _nomic_bert(fields: GgufFields) -> Config:
    return _encoder(
        fields,
        "nomic_bert",
        rope_theta=fields.positive("rope.freq_base", 1000.0),
        attention_bias=has_bias(fields, "attn_qkv"),
        mlp_bias=has_bias(fields, "ffn_up"),
        mlp_down_bias=has_bias(fields, "ffn_down"),
    )


def _modern_bert(fields: GgufFields) -> Config:
    config = _encoder(
        fields,
        "modernbert",
        global_rope_theta=fields.positive("rope.freq_base", 160_000.0),
        local_rope_theta=fields.positive("rope.freq_base_swa", 10_000.0),
        local_attention=fields.size("attention.sliding_window", 128),
        attention_bias=has_bias(fields, "attn_qkv"),
        mlp_bias=has_bias(fields, "ffn_up"),
        norm_bias=has_bias(fields, "ffn_norm"),
    )
    period = fields.own("attention.sliding_window_pattern", (int, list), "a whole number or a list", 3)
    if not isinstance(period, list):
        return config | {"global_attn_every_n_layers": period}
    return config | {"layer_types": [SLIDING if each else "full_attention" for each in period]}


def _gemma(fields: GgufFields, config: Config) -> Config:
    """The fields of layers with windows, and what llama.cpp takes for granted."""
    del config["rope_theta"], config["rope_scaling"]
    thetas = {"full_attention": ("rope.freq_base", 1e6), SLIDING: ("rope.freq_base_swa", 1e4)}
    sections = {kind: {"rope_type": "default", "rope_theta": fields.positive(*theta)} for kind, theta in thetas.items()}
    return {
        "use_bidirectional_attention": True,
        "query_pre_attn_scalar": config["head_dim"],
        "rope_parameters": sections,
    }


ENCODER_CONFIGS = {
    "bert": _bert,
    "nomic-bert": _nomic_bert,
    "modern-bert": _modern_bert,
    "gemma-embedding": row(
        "gemma3_text",
        windows(6, may_differ=True),
        _gemma,
        eps=("rms_norm_eps", RMS_EPS),
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
}
"""By the architecture of the file."""
