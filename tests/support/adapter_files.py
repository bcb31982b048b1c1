"""Files of LoRA adapters without torch: all numbers are zero."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.model_files.adapter_files import CONFIG_FILE, WEIGHTS_FILE

CONFIG: Mapping[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "init_lora_weights": True}
_MODULES: Mapping[str, tuple[int, int, int]] = {"model.layers.0.self_attn.q_proj": (4, 64, 64)}


def write_adapter(directory: Path, modules: Mapping[str, tuple[int, int, int]] = _MODULES, **config: object) -> Path:
    """An adapter with modules of these ranks, inputs and outputs; `config` differs from CONFIG."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps({**CONFIG, **config}))
    shapes: dict[str, list[int]] = {}
    for name, (rank, num_inputs, num_outputs) in modules.items():
        shapes[f"base_model.model.{name}.lora_A.weight"] = [rank, num_inputs]
        shapes[f"base_model.model.{name}.lora_B.weight"] = [num_outputs, rank]
    write_tensors(directory / WEIGHTS_FILE, shapes)
    return directory


def write_tensors(file: Path, shapes: Mapping[str, list[int]], dtype: str = "F32") -> None:
    size = {"F64": 8, "F32": 4}[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    written = json.dumps(header).encode()
    file.write_bytes(len(written).to_bytes(8, "little") + written + bytes(end))
