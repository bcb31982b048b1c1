"""Rotary tables equal the tables of transformers, in both forms of the configuration."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from quire.runtime.settings import ConfigurationError
from worker_svc.models.base import ConfigFields
from worker_svc.models.rope import MAX_TABLE_LENGTH, RopeConfig

CPU = torch.device("cpu")
HEAD_DIM = 32
MAX_POSITIONS = 96
ORIGINAL = {"original_max_position_embeddings": 48}
LONG_FACTORS = {
    "short_factor": [1.0 + 0.01 * index for index in range(HEAD_DIM // 2)],
    "long_factor": [1.0 + 0.3 * index for index in range(HEAD_DIM // 2)],
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}

SECTIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn-without-original": {"rope_type": "yarn", "factor": 2.0},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        **ORIGINAL,
    },
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.2, **ORIGINAL},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.8, **ORIGINAL},
    "longrope": {"rope_type": "longrope", **LONG_FACTORS, **ORIGINAL},
    "longrope-factor": {"rope_type": "longrope", "factor": 3.0, **LONG_FACTORS, **ORIGINAL},
    "longrope-attention-factor": {"rope_type": "longrope", "attention_factor": 1.3, **LONG_FACTORS, **ORIGINAL},
}


def make_config(section: dict[str, Any], *, theta: float = 5000.0) -> dict[str, Any]:
    return {"max_position_embeddings": MAX_POSITIONS, "rope_parameters": {**section, "rope_theta": theta}}


def read(config: dict[str, Any]) -> RopeConfig:
    return RopeConfig.read(ConfigFields(config), HEAD_DIM)


def table_of(config: dict[str, Any]) -> torch.Tensor:
    rope = read(config)
    return rope.cos_sin_table(CPU, rope.max_model_len)


def transformers_table(config: dict[str, Any], length: int) -> torch.Tensor:
    """The table of one sequence of this length."""
    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=2 * HEAD_DIM, num_attention_heads=2, **config))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    return torch.cat((cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]), dim=-1)


@pytest.mark.parametrize("name", SECTIONS)
def test_table_equals_that_of_transformers_for_one_sequence_of_the_length_that_is_served(name: str) -> None:
    config = make_config(SECTIONS[name])
    rope = read(config)
    original = rope.changes_beyond or 70
    for length in (1, original - 1, original, original + 1, rope.max_model_len):
        table = rope.cos_sin_table(CPU, length)
        assert table.shape == (length, HEAD_DIM)
        torch.testing.assert_close(table, transformers_table(config, length), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SECTIONS)
def test_only_the_types_that_depend_on_the_length_have_several_tables_and_name_them(name: str) -> None:
    rope = read(make_config(SECTIONS[name]))
    original = {"dynamic": MAX_POSITIONS, "longrope": 48}.get(name.split("-")[0])
    assert rope.changes_beyond == original
    lengths = (10, 48, 49, 96, 97, 98)
    tables = {length: rope.rotation_for(length, rope.max_model_len) for length in lengths}
    names = [rotation and rotation.name for rotation in tables.values()]
    whole = rope.cos_sin_table(CPU, 98)
    for length, found in zip(lengths, names, strict=True):
        for other, its in zip(lengths, names, strict=True):
            alike = torch.equal(rope.cos_sin_table(CPU, length)[:10], rope.cos_sin_table(CPU, other)[:10])
            assert (found == its) == alike
    if original is None:
        assert names == [None] * len(lengths)
        assert torch.equal(rope.cos_sin_table(CPU, 70), whole[:70])


def test_longrope_whose_factors_are_the_same_has_one_table() -> None:
    section = {"rope_type": "longrope", **LONG_FACTORS, **ORIGINAL, "short_factor": LONG_FACTORS["long_factor"]}
    assert read(make_config(section)).changes_beyond is None
    longer = {"rope_type": "longrope", **LONG_FACTORS, "original_max_position_embeddings": 96}
    assert read(make_config(longer)).changes_beyond is None


def test_more_positions_than_a_table_can_have_can_be_excluded() -> None:
    rope = read({"max_position_embeddings": MAX_TABLE_LENGTH + 1})
    with pytest.raises(ConfigurationError, match="16777217; expected at most 16777216, or a --max-model-len"):
        rope.cos_sin_table(CPU, rope.max_model_len)
    assert rope.cos_sin_table(CPU, 100).shape == (100, HEAD_DIM)


@pytest.mark.parametrize("name", SECTIONS)
def test_writing_of_transformers_4_means_the_same(name: str) -> None:
    section = dict(SECTIONS[name])
    older: dict[str, Any] = {"max_position_embeddings": MAX_POSITIONS, "rope_theta": 5000.0, "rope_scaling": section}
    if name == "default":
        older["rope_scaling"] = None
    expected = table_of(make_config(SECTIONS[name]))
    assert torch.equal(table_of(older), expected)
    section["type"] = section.pop("rope_type")
    assert torch.equal(table_of(older), expected)


def test_section_nested_by_layer_type_is_read() -> None:
    nested = make_config(LLAMA3)
    nested["rope_parameters"] = {"full_attention": nested["rope_parameters"]}
    assert torch.equal(table_of(nested), table_of(make_config(LLAMA3)))


def test_original_length_beside_the_section_is_read() -> None:
    section = {"rope_type": "longrope", **LONG_FACTORS}
    beside = {**make_config(section), **ORIGINAL}
    assert torch.equal(table_of(beside), table_of(make_config({**section, **ORIGINAL})))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"rope_type": "mrope"}, "rope_type is 'mrope'; expected one of default, linear"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "linear", "factor": -2.0}, "factor is -2.0; expected a number above 0"),
        ({"rope_type": "linear", "factor": "two"}, "factor is 'two'"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0; expected more than low_freq_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "a list of 16 numbers"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; expected 1"),
        ({"rope_theta": 1.0}, r"rope_theta is 1.0; expected a number above 1"),
        ({"rope_type": "linear", "factor": 1e9}, "expected at most 16777216"),
        ({"full_attention": {}, "sliding_attention": {}}, "one set of rope parameters"),
    ],
)
def test_sections_that_cannot_be_served_are_refused(section: dict[str, Any], message: str) -> None:
    config = {"max_position_embeddings": MAX_POSITIONS, "rope_parameters": section}
    with pytest.raises(ConfigurationError, match=message):
        table_of(config)
