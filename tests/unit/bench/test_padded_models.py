"""Models whose text is quire-tiny's, and of which nothing can be stored once for several places."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.padded_models import PADDED_SHAPES, write_padded_model
from quire.model_source import resolve_model

_FEW = {"vocab_size": 2112, "hidden_size": 640, "intermediate_size": 768, "num_hidden_layers": 6}
_TEXT = "Once upon a time there was a little girl. She had a red ball"


_OTHERS = (("llama-160m", (10, 10)), ("llama-160m", (10, 5)))


@pytest.fixture(
    params=[("qwen2-0.5b", (10, 5)), *(pytest.param(each, marks=pytest.mark.extended) for each in _OTHERS)], ids=str
)
def shape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small one of the family."""
    family, (num_heads, num_key_value_heads) = request.param
    sizes = _FEW | {"num_attention_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    monkeypatch.setitem(PADDED_SHAPES, "few", (*PADDED_SHAPES[family][:2], sizes))
    return "few"


def test_a_padded_model_says_what_quire_tiny_says_and_no_two_tensors_are_equal(shape: str, tmp_path: Path) -> None:
    write_padded_model(shape, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len({each.view(torch.uint8).numpy().tobytes() for each in tensors.values()}) == len(tensors)
    assert all(each.any() for each in tensors.values())

    source = resolve_model(None)
    ids = AutoTokenizer.from_pretrained(source)(_TEXT, return_tensors="pt").input_ids
    tiny, padded = (AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32) for each in (source, tmp_path))
    with torch.inference_mode():
        said = [cast(Any, model).generate(ids, max_new_tokens=60, do_sample=False) for model in (tiny, padded)]
        logits, of_padded = (model(said[0]).logits for model in (tiny, padded))
    assert torch.equal(*said)
    torch.testing.assert_close(of_padded[..., : logits.shape[-1]], logits, rtol=0.02, atol=0.1)
    assert (of_padded[..., logits.shape[-1] :] < -1).all()
