"""Names of tensors that a family has in its checkpoints, and not here."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from worker_svc.weights import Checkpoint, TensorSpec


def test_beginnings_and_parts_of_names_are_replaced_and_tensors_of_one_name_are_joined(tmp_path: Path) -> None:
    stored = {
        "backbone.norm.weight": torch.ones(2),
        "backbone.layers.0.mixer.k_conv.weight": torch.full((3, 2), 2.0),
        "backbone.layers.0.mixer.q_conv.weight": torch.full((1, 2), 1.0),
        "model.layers.1.mixer.v_conv.weight": torch.full((2, 2), 4.0),
        "model.layers.1.backbone.weight": torch.zeros(1),
    }
    save_file(stored, tmp_path / "model.safetensors")
    opened = Checkpoint.open(tmp_path, base_prefix="")
    assert opened.with_names({}) is opened
    renamed = opened.with_names(
        {".q_conv.": ".conv.", ".k_conv.": ".conv.", ".v_conv.": ".conv.", "backbone.": "model."}
    )
    assert renamed.tensors.keys() == {
        "model.norm.weight",
        "model.layers.0.mixer.conv.weight",
        "model.layers.1.mixer.conv.weight",
        "model.layers.1.backbone.weight",
    }
    spec = TensorSpec("model.layers.0.mixer.conv.weight", (4, 2))
    renamed.check([spec])
    assert renamed.read(spec)[:, 0].tolist() == [1, 2, 2, 2]
    assert renamed.num_bytes(spec) == 32
    assert renamed.coded(spec) is None
