"""Models that benchmarks round to formats of safetensors files."""

from pathlib import Path

import pytest
import torch

from bench.rounded_models import FORMATS, write_rounded
from quire.model_directory import ModelDirectory
from quire.model_source import resolve_model
from worker_svc.quantized_weights import with_quantized_weights
from worker_svc.weights import Checkpoint, TensorSpec


@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_near_those_that_were_rounded(format: str, tmp_path: Path) -> None:
    model, rounded = resolve_model(None), tmp_path / "rounded"
    write_rounded(model, rounded, format)
    found = with_quantized_weights(Checkpoint.open(rounded, base_prefix="model."), ModelDirectory.open(rounded))
    stored = Checkpoint.open(model, base_prefix="model.")
    for name in ("mlp.down_proj", "self_attn.q_proj"):
        weight = f"model.layers.0.{name}.weight"
        spec = TensorSpec(weight, stored.tensors[weight].shape)
        assert found.coded(spec) is not None
        expected = stored.read(spec).float()
        error = (found.read(spec) - expected).norm() / expected.norm()
        assert 0.001 < error < (0.05 if format == "FP8" else 0.12)
        assert torch.isfinite(found.read(spec)).all()
