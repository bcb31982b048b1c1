"""Directories and models that transformers' code cannot serve, and the preparation of models that it can."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quire.runtime.settings import ConfigurationError
from tests.support.models import FEW_EXPERTS, Family, edit_config, edit_tensors, make_model
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model

CPU = torch.device("cpu")


def load(directory: Path, model_impl: str = "auto") -> CausalLM:
    return load_model(directory, device=CPU, dtype=torch.float32, model_impl=model_impl)


def refusal_of(directory: Path, model_impl: str = "auto") -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(directory, model_impl)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    return message


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_model(tmp_path, "phi")
    return tmp_path


REFUSED = {
    "a state beside attention": (Family("FalconH1"), "2 of its 2 layers (hybrid) keep something else than keys and"),
    "attention to chosen blocks": (
        Family("MiniMaxM3VL", {**FEW_EXPERTS, "layer_types": 2 * ["minimax_m3_sparse"]}, "MiniMaxM3VLTextConfig"),
        "its attention takes block_indices, which paged attention does not have",
    ),
    "attention of its own": (Family("RoFormer", {"is_decoder": True}), "0 of its 2 layers attend through"),
    "positions of its own": (
        Family("Bart", {"is_decoder": True, "is_encoder_decoder": False}),
        "it ignores the positions that it is given",
    ),
    "positions from 2 on": (Family("Roberta", {"is_decoder": True}), "it does not count positions from 0"),
    "a mask of its own": (Family("Doge"), "it makes an attention mask of its own"),
    "both directions": (
        Family("Gemma3", {"head_dim": 32, "use_bidirectional_attention": True}, "Gemma3TextConfig"),
        "its attention is neither causal nor a sliding window",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_at_load(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is refused before weights are read, if that takes no numbers, and without the advice to install packages."""
    family, reason = REFUSED[case]
    make_model(tmp_path, family)
    if "positions" not in case:
        (tmp_path / "model.safetensors").unlink()
    capfd.readouterr()
    message = refusal_of(tmp_path, "transformers")
    assert capfd.readouterr().err == ""
    assert f"{family.name}ForCausalLM of {tmp_path} cannot be served through transformers: " in message
    assert reason in message


def remove_tensor(directory: Path) -> None:
    edit_tensors(directory, lambda tensors: {k: v for k, v in tensors.items() if not k.endswith("1.mlp.fc1.weight")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_tensor, "tensor model.layers.1.mlp.fc1.weight is missing from the safetensors files"),
        ({"intermediate_size": 90}, "mlp.fc1.bias has shape [96]; config.json asks for [90]"),
        ({"is_encoder_decoder": True}, "has an encoder; decoders are served"),
        (
            {"architectures": ["GPTNeoForCausalLM"]},
            "is no causal language model of transformers: its model type 'phi' is PhiForCausalLM",
        ),
        ({"architectures": ["PhiloForCausalLM"], "model_type": "philo"}, "model type `philo`"),
        ({"hidden_act": "sine"}, "sine"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "quantization_config.quant_method is 'mxfp4'; supported: awq, gptq",
        ),
    ],
)
def test_bad_directory_is_refused_with_one_line(
    change: Callable[[Path], None] | dict[str, Any], message: str, directory: Path
) -> None:
    if isinstance(change, dict):
        edit_config(directory, **change)
    else:
        change(directory)
    assert message in refusal_of(directory)


def test_code_in_the_directory_is_never_run(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    witness = tmp_path_factory.mktemp("witness") / "it-ran"
    (directory / "modeling_philo.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling_philo.PhiloConfig", "AutoModelForCausalLM": "modeling_philo.PhiloForCausalLM"}
    edit_config(directory, architectures=["PhiloForCausalLM"], model_type="philo", auto_map=auto_map)
    assert "PhiloForCausalLM" in refusal_of(directory)
    edit_config(directory, architectures=["PhiForCausalLM"], model_type="phi")
    load(directory)
    assert not witness.exists()


def test_kernels_of_the_hub_are_never_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_by_transformers = vars(PreTrainedModel)["from_pretrained"].__func__
    asked: list[bool] = []

    def from_pretrained(cls: Any, *args: Any, use_kernels: bool = True, **kwargs: Any) -> Any:
        """As transformers 5.25, which loads them by default."""
        asked.append(use_kernels)
        return load_by_transformers(cls, *args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    load(directory, "transformers")
    assert asked == [False]


@pytest.mark.parametrize(
    ("rope", "max_model_len"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 512),
        # Their frequencies change with the longest sequence of a batch.
        ({"rope_type": "dynamic", "factor": 2.0}, 512),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 16,
                "long_factor": [2.0] * 16,
                "original_max_position_embeddings": 128,
            },
            128,
        ),
    ],
)
def test_length_ends_where_rotation_would_depend_on_the_batch(
    rope: dict[str, Any], max_model_len: int, tmp_path: Path
) -> None:
    make_model(tmp_path, "llama-gqa-untied-32", rope_parameters={"rope_theta": 10000.0, **rope})
    assert load(tmp_path, "transformers").max_model_len == max_model_len
