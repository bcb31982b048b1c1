"""The maximum sequence length with which a transformers model is served."""

from typing import Any

import pytest
from transformers import (
    BloomConfig,
    FalconMambaConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    MptConfig,
    PreTrainedConfig,
)

from quire.runtime.settings import ConfigurationError
from worker_svc.models.transformers.model import remembered_by_generate
from worker_svc.models.transformers.probe import max_model_len_of


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=300), 300),
        # `seq_length` is the length of its training.
        (LlamaConfig(max_position_embeddings=300, seq_length=128), 300),
        (MptConfig(max_seq_len=700), 700),
        (BloomConfig(seq_length=900), 900),
        (BloomConfig(), 2048),
        # Beyond the first chunk, tokens no longer see earlier chunks.
        (Llama4TextConfig(max_position_embeddings=9000, attention_chunk_size=512, floor_scale=8192), 512),
        (Llama4TextConfig(max_position_embeddings=300, attention_chunk_size=512, floor_scale=8192), 300),
        # Token 200, counted from 1, is the first whose temperature is not 1.
        (Llama4TextConfig(max_position_embeddings=300, attention_chunk_size=512, floor_scale=200), 199),
        (Llama4TextConfig(max_position_embeddings=300, floor_scale=200, attn_temperature_tuning=False), 300),
    ],
)
def test_the_length_is_what_the_configuration_allows(config: PreTrainedConfig, length: int) -> None:
    assert max_model_len_of(config) == length


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTNeoConfig(window_size=0), "window_size is 0; expected an integer of at least 1"),
        (Llama4TextConfig(floor_scale=1), "floor_scale is 1; expected an integer of at least 2"),
        (Llama4TextConfig(attention_chunk_size=0), "attention_chunk_size is 0; expected an integer of at least 1"),
        (LlamaConfig(index_topk=0), "index_topk is 0; expected an integer of at least 1"),
    ],
)
def test_lengths_with_which_tokens_see_nothing_are_refused(config: PreTrainedConfig, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        max_model_len_of(config)


def test_a_model_that_names_no_length_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'falcon_mamba' has no max_position_embeddings"):
        max_model_len_of(FalconMambaConfig())


@pytest.mark.parametrize(
    ("fields", "windows", "length"),
    [
        ({"sliding_window": 20}, [20, 20], None),
        ({"sliding_window": 20}, [None, None], 20),
        ({"sliding_window": 20}, [20, 32], 20),
        ({"sliding_window": 20}, [12, 12], None),
        ({"sliding_window": 20}, 4 * [20], None),
        ({"sliding_window": 20}, [20, 20, None, None], 20),
        ({"sliding_window": None}, [None, None], None),
        ({"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}, [20, None], None),
        ({"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}, [20, 20, None, None], None),
        ({"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}, [None, 20], 20),
    ],
)
def test_a_cache_that_forgets_what_masks_show_bounds_the_length(
    fields: dict[str, Any], windows: list[int | None], length: int | None
) -> None:
    config = PreTrainedConfig(num_hidden_layers=2)  # pyrefly: ignore
    for name, value in fields.items():
        setattr(config, name, value)
    assert remembered_by_generate(config, windows) == length
