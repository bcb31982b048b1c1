"""Sizes of the states that a sequence has in layers without keys, from config.json, in bytes and in blocks.

The worker's models have the same numbers from their layers (`StateLayout`). This module needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_COLUMNS, _FLOAT_BYTES, _ALIGNMENT, _BLOCKS_OF_STATE = 16, 4, 64, 512
"""Columns of a tile, bytes of an element, the alignment of blocks, and the most blocks of a state without attention, as
in `quire_kernels.states` and the worker's pool."""

_STATES = ("linear_attention", "conv", "mamba")
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


@dataclass(frozen=True, slots=True)
class StateSizes:
    """The state of one sequence, in float32.

    Attributes:
        num_layers: Layers that keep a state.
        num_attending: Layers that keep keys and values.
        tiles: The parts of a layer's state on a rank: number of tiles, and lines of each.
        parameters: Elements of the matrices of such a layer, without its MLP.
        kind: For people.
        num_ranks: Ranks that share the model.
    """

    num_layers: int
    num_attending: int
    tiles: tuple[tuple[int, int], ...]
    parameters: int
    kind: str
    num_ranks: int = 1

    @property
    def unit_bytes(self) -> int:
        """A unit lies within one block, and holds whole tiles of one layer."""
        return max(lines for _, lines in self.tiles) * _COLUMNS * _FLOAT_BYTES

    @property
    def num_units(self) -> int:
        """Units on a rank."""
        per_unit = [self.unit_bytes // (lines * _COLUMNS * _FLOAT_BYTES) for _, lines in self.tiles]
        return self.num_layers * sum(-(-count // most) for (count, _), most in zip(self.tiles, per_unit, strict=True))

    def block_bytes(self, bytes_of_tokens: int) -> int:
        """Bytes of a block on a rank: of its tokens in the layers of attention there, or of a unit if that is larger.
        Without such layers a block is a part of a state."""
        least = bytes_of_tokens or -(-self.num_units // _BLOCKS_OF_STATE) * self.unit_bytes
        return -(-max(least, self.unit_bytes) // _ALIGNMENT) * _ALIGNMENT

    def num_blocks(self, block_bytes: int) -> int:
        """Blocks that hold a state, on each rank; `block_bytes` are of a rank."""
        return -(-self.num_units // (block_bytes // self.unit_bytes))

    @property
    def num_bytes(self) -> int:
        """Bytes of a state on all ranks together."""
        return self.num_ranks * self.num_units * self.unit_bytes


def state_sizes(architecture: str, config: Mapping[str, Any], num_ranks: int = 1) -> StateSizes | None:
    """The sizes; None if no layer keeps a state, if the configuration does not determine them, or if the ranks cannot
    have equal parts."""
    try:
        sizes = _read(architecture, config, num_ranks)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    return None if sizes is None else replace(sizes, num_ranks=num_ranks)


def _read(architecture: str, config: Mapping[str, Any], num_ranks: int) -> StateSizes | None:
    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(name)
        return value

    def of_rank(count: int) -> int:
        if count % num_ranks:
            raise ValueError(count)
        return count // num_ranks

    hidden, count = number("hidden_size"), number("num_hidden_layers", 1)
    types = config.get("layer_types") or config.get("layers_block_type")
    is_mamba, inner, heads, lines, groups, taps, num_attending = False, 0, 0, 0, 1, 4, count
    match architecture:
        case (
            "Qwen3_5ForCausalLM"
            | "Qwen3_5MoeForCausalLM"
            | "Qwen3NextForCausalLM"
            | "OlmoHybridForCausalLM"
            | "LaraMiniForCausalLM"
        ):
            every = number("full_attention_interval", 4)
            types = types or [_STATES[0] if (index + 1) % every else "attention" for index in range(count)]
            if architecture == "OlmoHybridForCausalLM":
                attending = number("num_attention_heads", 30)
                key_heads = number("linear_num_key_heads", attending)
                heads, lines = number("linear_num_value_heads", attending), int(0.75 * hidden / key_heads)
                lines = number("linear_key_head_dim", lines)
                columns = number("linear_value_head_dim", 2 * lines)
            else:
                usual = 8 if architecture == "LaraMiniForCausalLM" else 16
                key_heads, heads = number("linear_num_key_heads", usual), number("linear_num_value_heads", 2 * usual)
                lines, columns = number("linear_key_head_dim", 128), number("linear_value_head_dim", 128)
            channels, inner = 2 * key_heads * lines + heads * columns, heads * columns
            parameters = hidden * (channels + 2 * inner + 2 * heads)
            heads, channels = of_rank(key_heads) * (heads // key_heads), of_rank(channels)
            parts = _conv(channels, number("linear_conv_kernel_dim", 4)), (heads * -(-columns // _COLUMNS), lines)
            return _sizes(types, parts, parameters, "delta rule")
        case "KimiLinearForCausalLM":
            section = config.get("linear_attn_config") or {}
            heads = section.get("num_heads") or number("linear_num_heads", 32)
            lines = section.get("head_dim") or number("linear_head_dim", 128)
            taps = section.get("short_conv_kernel_size") or number("linear_conv_kernel_dim", 4)
            attending = section.get("full_attn_layers") or range(5, count + 1, 4)
            types = types or ["attention" if index + 1 in attending else _STATES[0] for index in range(count)]
            inner = heads * lines
            parts = _conv(3 * of_rank(heads) * lines, taps), (of_rank(heads) * -(-lines // _COLUMNS), lines)
            parameters = hidden * (4 * inner + 2 * lines + heads) + 2 * lines * inner
            return _sizes(types, parts, parameters, "delta rule")
        case "JambaForCausalLM" | "MambaForCausalLM" | "FalconMambaForCausalLM":
            is_jamba = architecture == "JambaForCausalLM"
            names = "mamba_d_state", "mamba_d_conv", "mamba_dt_rank"
            lines, taps, rank = names if is_jamba else ("state_size", "conv_kernel", "time_step_rank")
            lines, taps = number(lines, 16), number(taps, 4)
            rank = -(-hidden // 16) if config.get(rank, "auto") == "auto" else number(rank)
            types = ["mamba"] * count
            if is_jamba:
                inner = number("mamba_expand", 2) * hidden
                first, every = config.get("attn_layer_offset", 4), number("attn_layer_period", 8)
                types = ["attention" if index % every == first else "mamba" for index in range(count)]
            else:
                inner = number("intermediate_size", int(config.get("expand", 2) * hidden))
            parts = _conv(of_rank(inner), taps), (-(-of_rank(inner) // _COLUMNS), lines)
            return _sizes(types, parts, 3 * hidden * inner + 2 * inner * (rank + lines), "Mamba")
        case "Mamba2ForCausalLM":
            types = ["mamba"] * count
            heads, columns, groups = number("num_heads", 128), number("head_dim", 64), number("n_groups", 8)
            inner, lines, taps = heads * columns, number("state_size", 128), number("conv_kernel", 4)
        case "Lfm2ForCausalLM" | "Lfm2MoeForCausalLM":
            attending = config.get("full_attn_idxs")
            attending = range(count) if attending is None else attending
            types = types or ["attention" if index in attending else "conv" for index in range(count)]
            parts = (_conv(of_rank(hidden), number("conv_L_cache", 3)),)
            return _sizes(types, parts, 4 * hidden * hidden, "convolution")
        case "Lfm3ForCausalLM":
            types = types or ["attention" if index and not index % 2 else "conv" for index in range(count)]
            parts = (_conv(of_rank(hidden), number("conv_L_cache", 7)),)
            return _sizes(types, parts, 4 * hidden * hidden, "convolution")
        case "BambaForCausalLM":
            attending = config.get("attn_layer_indices") or ()
            types = ["attention" if index in attending else "mamba" for index in range(count)]
            is_mamba = True
        case "GraniteMoeHybridForCausalLM" | "FalconH1ForCausalLM":
            is_mamba = True
        case "Zamba2ForCausalLM":
            heads, lines, taps = number("n_mamba_heads", 8), number("mamba_d_state", 64), number("mamba_d_conv", 4)
            inner, groups = number("mamba_expand", 2) * hidden, number("mamba_ngroups", 1)
            if not isinstance(types, list):
                return None
            num_attending = types.count("hybrid")
        case "NemotronHForCausalLM":
            types = types or [_LETTERS[letter] for letter in str(config["hybrid_override_pattern"])]
            heads, columns = number("mamba_num_heads", 128), number("mamba_head_dim", 64)
            inner, groups = heads * columns, number("n_groups", number("mamba_n_groups", 8))
            lines, taps = number("ssm_state_size", 128), number("conv_kernel", 4)
        case _:
            return None
    if is_mamba:
        is_falcon = architecture == "FalconH1ForCausalLM"
        heads, lines, taps = number("mamba_n_heads", 128), number("mamba_d_state", 256), number("mamba_d_conv", 4)
        inner = number("mamba_d_ssm", 1024 if is_falcon else number("mamba_expand", 2) * hidden)
        groups = number("mamba_n_groups", 1)
    if inner % heads:
        raise ValueError(heads)
    parameters = hidden * (3 * inner + 2 * groups * lines + heads)
    if groups % num_ranks and num_ranks % groups:
        raise ValueError(groups)
    channels = of_rank(heads) * (inner // heads) + 2 * max(groups // num_ranks, 1) * lines
    parts = _conv(channels, taps), (of_rank(heads) * -(-(inner // heads) // _COLUMNS), lines)
    if architecture in ("FalconH1ForCausalLM", "Zamba2ForCausalLM"):
        return StateSizes(count, num_attending, parts, parameters, "Mamba 2")
    return _sizes(types, parts, parameters, "Mamba 2")


def _conv(channels: int, taps: int) -> tuple[int, int]:
    if taps < 2:
        raise ValueError(taps)
    return -(-channels // _COLUMNS), taps - 1


def _sizes(types: Any, parts: tuple[tuple[int, int], ...], parameters: int, kind: str) -> StateSizes | None:
    if not isinstance(types, list):
        return None
    num_layers = sum(each in _STATES for each in types)
    num_attending = sum(each in ("attention", "full_attention", "sliding_attention") for each in types)
    return StateSizes(num_layers, num_attending, parts, parameters, kind) if num_layers else None
