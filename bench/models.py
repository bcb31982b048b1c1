"""Models of real shapes with random weights, for measurements of speed only: nothing is downloaded."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.model_files.model_source import resolve_model

SHAPES: dict[str, dict[str, Any]] = {
    "llama-160m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
    },
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_model(shape: str, directory: Path) -> None:
    """Writes a model of this shape in bfloat16, with quire-tiny's tokenizer, into the directory."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], bos_token_id=1, eos_token_id=2, pad_token_id=0))
    model.bfloat16().save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        shutil.copy(resolve_model(None) / name, directory / name)
