"""Random LoRA adapters for small models, in directories as PEFT writes them, and models that they are merged into."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALL_LINEAR = (
    *(*ATTENTION, *MLP, "qkv_proj", "gate_up_proj", "out_proj", "fc1", "fc2", "c_attn", "c_proj", "c_fc"),
    "shared_expert_gate",
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("per_layer_input_gate", "per_layer_projection", "linear_left", "linear_right"),
    *("modality_router", "prediction_coefs", "correction_coefs"),
)
"""The linear layers of all of Quire's families."""


def make_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = ALL_LINEAR,
    seed: int = 0,
    config: Mapping[str, object] | None = None,
) -> Path:
    """Writes an adapter of a model of transformers.

    Args:
        targets: last parts of the names of the modules that it adapts.
        config: fields of adapter_config.json that differ.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in targets or not isinstance(module, nn.Linear | Conv1D):
            continue
        num_inputs, num_outputs = shape_of(module)
        a = torch.randn(rank, num_inputs, generator=generator) * num_inputs**-0.5
        b = torch.randn(num_outputs, rank, generator=generator) * 0.5 * rank / alpha * rank**-0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b * module.weight.detach().float().std() * num_inputs**0.5
    save_file(tensors, directory / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        **(config or {}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return directory


def merge_adapter(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """Adds alpha / r * B A of an adapter (alpha / sqrt(r) of rsLoRA) to the model's weights, as PEFT's merge does."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    rank = config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    with torch.no_grad():
        for name, a in tensors.items():
            if not name.endswith("lora_A.weight"):
                continue
            module = modules[name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
            assert isinstance(module, nn.Linear | Conv1D)
            delta = scale * tensors[name.replace("lora_A", "lora_B")] @ a
            module.weight += delta.t() if isinstance(module, Conv1D) else delta
    return model


def shape_of(module: nn.Linear | Conv1D) -> tuple[int, int]:
    """Number of inputs and outputs of a layer."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.weight.shape[0], module.weight.shape[1]
