"""Models whose rotation depends on the length of the sequence: all sequences of a server have the same rotation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.support.gguf_files import write_gguf
from tests.support.models import VOCAB_SIZE, Family, make_model
from tests.support.paged import PagedRunner, Span
from worker_svc.models.base import CausalLM, ConfigFields
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.registry import load_model
from worker_svc.models.rope import RopeConfig

ORIGINAL, LONGEST = 32, 128
LONG = {"rope_type": "longrope", "rope_theta": 1e4}
FACTORS = {"short_factor": [1.0, 1.1, 1.25, 2.0], "long_factor": [1.0, 3.0, 10.0, 30.0]}
PHI_3 = {
    "original_max_position_embeddings": ORIGINAL,
    "max_position_embeddings": LONGEST,
    "rope_parameters": {**LONG, **FACTORS, "partial_rotary_factor": 0.5},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SCALED = {
    "phi3-longrope": Family("Phi3", PHI_3),
    "qwen2-dynamic": Family("Qwen2", {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC}),
}


def load(directory: Path, max_model_len: int | None, model_impl: str = "auto") -> CausalLM:
    options: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32}
    return load_model(directory, **options, max_model_len=max_model_len, model_impl=model_impl)


def make_sequences(*lengths: int) -> list[list[int]]:
    """Prefixes of one text, like prompts that share a prefix."""
    text = torch.randint(3, VOCAB_SIZE, (LONGEST,), generator=torch.Generator().manual_seed(5)).tolist()
    return [text[:length] for length in lengths]


@torch.inference_mode()
def logits_of(reference: PreTrainedModel, sequence: list[int]) -> torch.Tensor:
    return reference(torch.tensor([sequence])).logits[0]


def assert_serves_each_like(model: CausalLM, expected: torch.Tensor, *lengths: int) -> None:
    """Compares whole sequences in one batch; then chunks, single tokens, and the blocks of another sequence."""
    sequences = make_sequences(*lengths)
    whole = PagedRunner(model, sequences, block_size=16)
    found = whole.step(*(Span(row, 0, length) for row, length in enumerate(lengths)))
    torch.testing.assert_close(found, torch.cat([expected[:length] for length in lengths]), rtol=1e-4, atol=1e-4)
    longest = max(lengths)
    steps = PagedRunner(model, make_sequences(longest), block_size=5)
    ends = [7, min(ORIGINAL - 2, longest - 1), *range(ORIGINAL - 1, min(ORIGINAL + 3, longest)), longest]
    for start, end in zip([0, *ends], ends, strict=False):
        if start < end:
            found = steps.step(Span(0, start, end))
            torch.testing.assert_close(found, expected[start:end], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("name", SCALED)
def test_by_default_sequences_end_where_the_rotation_would_change(name: str, model_impl: str, tmp_path: Path) -> None:
    reference = make_model(tmp_path, SCALED[name])
    model = load(tmp_path, None, model_impl)
    assert model.max_model_len == ORIGINAL
    assert_serves_each_like(model, logits_of(reference, make_sequences(ORIGINAL)[0]), ORIGINAL, 9, 20)


@pytest.mark.parametrize("served", [ORIGINAL + 1, LONGEST])
@pytest.mark.parametrize("name", SCALED)
def test_longer_sequences_and_all_in_their_company_are_rotated_as_the_longest(
    name: str, served: int, tmp_path: Path
) -> None:
    """A sequence of the served length has the same logits as in transformers, and its prefixes share its keys."""
    reference = make_model(tmp_path, SCALED[name])
    expected = logits_of(reference, make_sequences(served)[0])
    model = load(tmp_path, served)
    assert model.max_model_len == LONGEST
    assert_serves_each_like(model, expected, served, 9, ORIGINAL, ORIGINAL + 1)


def test_a_file_of_gguf_follows_the_same_rule(tmp_path: Path) -> None:
    reference = make_model(tmp_path / "model", SCALED["phi3-longrope"])
    file = write_gguf(tmp_path / "m.gguf", tmp_path / "model")
    for served, length in ((None, ORIGINAL), (LONGEST, LONGEST)):
        model = load(file, served)
        assert model.max_model_len == length
        assert_serves_each_like(model, logits_of(reference, make_sequences(length)[0]), length)


def test_the_rotation_of_layers_with_windows_counts_too() -> None:
    values = {"num_hidden_layers": 1, "max_position_embeddings": LONGEST, "rope_parameters": {"rope_type": "default"}}
    rope = {"original_max_position_embeddings": ORIGINAL, **LONG, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    config = DecoderConfig.read(values)
    assert (config.served_len(None), config.rotation_for(None)) == (LONGEST, None)
    fields = ConfigFields({"max_position_embeddings": LONGEST, "rope_parameters": rope})
    config = replace(config, sliding_rope=RopeConfig.read(fields, 128))
    assert (config.served_len(None), config.served_len(77), config.served_len(1000)) == (ORIGINAL, 77, LONGEST)
    rotation = config.rotation_for(77)
    assert rotation is not None
    assert (rotation.name, rotation.original, rotation.longest) == ("extended", ORIGINAL, LONGEST)
    other = ConfigFields({**fields.values, "rope_parameters": {**rope, "original_max_position_embeddings": 64}})
    both = replace(config, rope=RopeConfig.read(other, 128))
    names = [both.rotation_for(length) for length in (None, 33, 65)]
    assert [(each.name, each.original) for each in names if each is not None] == [
        ("original, original", ORIGINAL),
        ("original, extended", ORIGINAL),
        ("extended, extended", ORIGINAL),
    ]
