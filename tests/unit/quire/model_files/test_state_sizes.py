"""Sizes of states from config.json equal the sizes in the worker's models."""

from typing import Any

import pytest

from quire.model_files.state_sizes import state_sizes
from worker_svc.device.arena import arena_block_bytes
from worker_svc.models.families_with_states import WITH_STATES
from worker_svc.parallel.ranks import Ranks

_SIZES = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 1000}
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
_MAMBA = {"mamba_n_heads": 64, "mamba_d_state": 128, "mamba_n_groups": 2}
_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {"head_dim": 256, "linear_num_value_heads": 16, "linear_conv_kernel_dim": 3},
    "Qwen3_5MoeForCausalLM": {"head_dim": 256, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "Qwen3NextForCausalLM": {"head_dim": 256, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "LaraMiniForCausalLM": {
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"] * 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
    "OlmoHybridForCausalLM": {"linear_num_value_heads": 32},
    "KimiLinearForCausalLM": {
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "num_heads": 8,
            "head_dim": 64,
            "short_conv_kernel_size": 3,
        },
        "moe_intermediate_size": 64,
    },
    "JambaForCausalLM": {"mamba_d_state": 32, "attn_layer_period": 3, "attn_layer_offset": 1},
    "MambaForCausalLM": {"state_size": 8},
    "FalconMambaForCausalLM": {"conv_kernel": 3},
    "Mamba2ForCausalLM": {"n_groups": 2, "num_heads": 64, "head_dim": 64},
    "Lfm2ForCausalLM": {"full_attn_idxs": [2, 5], "conv_L_cache": 4},
    "Lfm2MoeForCausalLM": {
        "layer_types": ["conv", "full_attention"] * 4,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
    },
    "Lfm3ForCausalLM": {"conv_L_cache": 3},
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [3]},
    "GraniteMoeHybridForCausalLM": {**_MAMBA, "layer_types": ["mamba", "attention"] * 4, "num_local_experts": 0},
    "FalconH1ForCausalLM": {**_MAMBA, "mamba_d_ssm": 1536, "mamba_n_heads": 24},
    "Zamba2ForCausalLM": {
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"] * 2,
        "n_mamba_heads": 64,
        "mamba_ngroups": 2,
    },
    "NemotronHForCausalLM": {
        "hybrid_override_pattern": "M-M*M-M-",
        "n_groups": 8,
        "mamba_num_heads": 64,
        "head_dim": 128,
    },
}


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("architecture", WITH_STATES)
def test_every_family_has_the_sizes_of_its_layers(architecture: str, num_ranks: int) -> None:
    values = {**_SIZES, **_HEADS, **_CONFIGS[architecture]}
    config, found = WITH_STATES[architecture].read_config(values), state_sizes(architecture, values, num_ranks)
    size = config.state_size(Ranks(0, num_ranks))
    assert size is not None
    assert found is not None
    assert (found.num_units, found.unit_bytes) == (size.num_units, size.unit_bytes)
    assert (found.num_layers, found.num_attending) == (len(config.state_layers), len(config.key_layers))
    for num_bytes in (1000, 1 << 20) if config.key_layers else (0,):
        block_bytes = arena_block_bytes(num_bytes, size)
        assert found.block_bytes(num_bytes) == block_bytes
        assert found.num_blocks(block_bytes) == size.num_blocks(block_bytes)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {}),
        ("BambaForCausalLM", {"hidden_size": "wide"}),
        ("GraniteMoeHybridForCausalLM", {"layer_types": None}),
        ("NemotronHForCausalLM", {}),
        ("Lfm2ForCausalLM", {"conv_L_cache": 1}),
        ("Lfm2ForCausalLM", {"full_attn_idxs": 3}),
        ("BambaForCausalLM", {"mamba_n_heads": 10**9}),
    ],
)
def test_other_configurations_have_no_states(architecture: str, changes: dict[str, Any]) -> None:
    assert state_sizes(architecture, {**_SIZES, **_HEADS, **changes}) is None
