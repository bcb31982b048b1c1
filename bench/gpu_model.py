"""LLaMA shapes with random weights, made on the device: nothing is downloaded or filled in by a processor."""

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.model_files.model_source import resolve_model
from worker_svc.models.decoder import Decoder
from worker_svc.models.families import DECODERS
from worker_svc.weights import Loadable, MadeTensors, Placement, TensorSpec

DTYPE = torch.bfloat16
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
_COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def config_of(shape: str) -> dict[str, Any]:
    """config.json of a shape in SHAPES."""
    return _COMMON | SHAPES[shape]


def make_model(config: Mapping[str, Any], device: torch.device, dtype: torch.dtype = DTYPE) -> Decoder:
    """The model, loaded with random weights."""
    model = DECODERS["LlamaForCausalLM"].from_config(config, Placement(device, dtype))
    for layer in _layers(model):
        layer.load(MadeTensors(lambda spec: _random(spec, device)))
    return model.eval()


def step_bytes(model: Decoder) -> int:
    """Bytes of weights that a step reads, without the embedding, since a step reads only one row of it a token."""
    specs = [spec for layer in _layers(model) for spec in layer.tensors()]
    return sum(math.prod(spec.shape) for spec in specs if "embed_tokens" not in spec.name) * DTYPE.itemsize


def write_model(config: Mapping[str, Any], directory: Path, device: torch.device) -> None:
    """Writes such a model, with quire-tiny's tokenizer, as transformers does; random numbers are drawn on `device`."""
    model = DECODERS["LlamaForCausalLM"].from_config(config, Placement(device, DTYPE))
    specs = [spec for layer in _layers(model) for spec in layer.tensors()]
    save_file(
        {spec.name: _random(spec, device).cpu() for spec in specs},
        directory / "model.safetensors",
        # Without this entry transformers takes the file for one of another framework.
        metadata={"format": "pt"},
    )
    (directory / "config.json").write_text(json.dumps(dict(config)))
    for name in _TOKENIZER_FILES:
        shutil.copy(resolve_model(None) / name, directory / name)


def _layers(model: Decoder) -> list[Loadable]:
    return [module for module in model.modules() if isinstance(module, Loadable)]


def _random(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Weights that keep the size of activations about equal; norms of 1."""
    if len(spec.shape) == 1:
        return torch.ones(spec.shape, dtype=DTYPE, device=device)
    return torch.randn(spec.shape, dtype=DTYPE, device=device) * spec.shape[1] ** -0.5
