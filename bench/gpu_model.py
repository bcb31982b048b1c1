"""LLaMA shapes with random weights, made on the device: nothing is downloaded or filled in by a processor."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.models import SHAPES, copy_tokenizer
from worker_svc.models.decoder import Decoder
from worker_svc.models.registry import DECODERS
from worker_svc.weights import Loadable, MadeTensors, Placement, TensorSpec

DTYPE = torch.bfloat16


def config_of(shape: str) -> dict[str, Any]:
    """config.json of a LLaMA in `bench.models.SHAPES`."""
    own = {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
    return own | SHAPES[shape]


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


def write_made_model(config: Mapping[str, Any], directory: Path, device: torch.device) -> None:
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
    copy_tokenizer(directory)


def _layers(model: Decoder) -> list[Loadable]:
    return [module for module in model.modules() if isinstance(module, Loadable)]


def _random(spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """Weights that keep the size of activations about equal; norms of 1."""
    if len(spec.shape) == 1:
        return torch.ones(spec.shape, dtype=DTYPE, device=device)
    return torch.randn(spec.shape, dtype=DTYPE, device=device) * spec.shape[1] ** -0.5
