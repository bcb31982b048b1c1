"""Names of tensors that a family has in its checkpoints, and not here."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.models import edit_tensors, make_model
from tests.support.paged import PagedRunner, Span
from worker_svc.models.registry import load_model
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


@pytest.mark.parametrize("family", ["mixtral", "minimax-m2", "phi-moe", "lfm2-moe", "kimi-linear"])
def test_experts_may_have_the_names_that_llm_compressor_gives_to_all_families(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family)
    tokens = [3 + 7 * index % 300 for index in range(20)]

    def logits() -> torch.Tensor:
        model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
        return PagedRunner(model, [tokens], block_size=4).step(Span(0, 0, 20))

    expected = logits()
    names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

    def new_name(name: str) -> str:
        return re.sub(r"(\.experts\.\d+\.)(w\d)\.", lambda found: f"{found[1]}{names[found[2]]}.", name)

    edit_tensors(tmp_path, lambda tensors: {new_name(name): tensor for name, tensor in tensors.items()})
    assert torch.equal(logits(), expected)
