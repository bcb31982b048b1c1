"""Every causal type of transformers: logits equal to transformers', or a line that says why it is refused."""

from pathlib import Path

import pytest
import torch

from quire.runtime.settings import ConfigurationError
from tests.real.families import NOT_TRIED, REFUSED, TYPES, tiny_model, write_config
from tests.support.parity import assert_serves_like
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model

pytestmark = pytest.mark.real

SAMPLE = (
    *("bloom", "cohere2", "deepseek_v3", "gemma4_text", "gpt_oss", "lfm2", "mixtral", "qwen3", "rwkv"),
    "xlm-roberta",
)
LINES = {model_type: line for line, types in REFUSED.items() for model_type in types}
# Only a run with weights shows why they are refused.
SHOWN_BY_WEIGHTS = {"camembert", "data2vec-text", "dots3_note_text", "roberta", "roberta-prelayernorm", "xlm-roberta"}
SHOWN_BY_WEIGHTS |= {"xlm-roberta-xl", "xlnet", "xmod"}

# The logits that transformers computes in float32 differ from its logits in float64 by up to 1.8e-4.
COMPARED_IN_FLOAT64 = {"qwen3_5_moe", "qwen3_5_moe_text"}


def _cases() -> list[object]:
    cases: list[object] = []
    for model_type in sorted(TYPES.keys() - NOT_TRIED.keys()):
        marks = [pytest.mark.extended] if model_type in SAMPLE else []
        if model_type in LINES:
            marks.append(pytest.mark.xfail(raises=ConfigurationError, reason=LINES[model_type], strict=True))
        cases.append(pytest.param(model_type, marks=marks, id=model_type))
    return cases


def load(directory: Path) -> CausalLM:
    return load_model(directory, device=torch.device("cpu"), dtype=torch.float32)


@pytest.mark.parametrize("model_type", _cases())
def test_logits_equal_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    """A refusal has the expected line, and comes before weights are read."""
    line = LINES.get(model_type)
    if line is not None and model_type not in SHOWN_BY_WEIGHTS:
        write_config(model_type, tmp_path)
        assert line in _refusal(tmp_path)
        load(tmp_path)
    reference = tiny_model(model_type, tmp_path)
    if model_type in COMPARED_IN_FLOAT64:
        # Its grouped products of experts have no float64.
        reference.double().set_experts_implementation("eager")
    if line is not None:
        assert line in _refusal(tmp_path)
    assert_serves_like(reference, load(tmp_path))


def _refusal(directory: Path) -> str:
    try:
        load(directory)
    except ConfigurationError as error:
        return str(error)
    return "it is served"
