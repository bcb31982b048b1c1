"""The properties of a language model that a cost model needs: layers, widths and derived numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, cast

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from quire.model_files.model_directory import ModelDirectory
from quire.model_files.state_sizes import StateSizes, state_sizes
from quire.runtime.settings import ConfigurationError

_COMPARED_TOKENS, _MAX_WASTE = 8192, 1.03
"""As in `worker_svc.device.layer_cut`."""

DTYPE_BYTES = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with attention and a feed-forward block in each layer.

    Attributes:
        ffn_matrices: Matrices of the feed-forward block: 2, or 3 if it has a gate.
        has_biases: Whether linear layers have biases and norms have a shift.
        num_positions: Rows of a table of learned positions; 0 if positions are rotations.
        is_tied: Whether the head is the table of embeddings.
        dtype_bytes: Bytes of a weight, and of an element of the KV pool.
        max_model_len: Maximum number of tokens of a sequence.
        num_windowed: Layers that read only the last `window` tokens.
        states: Sizes of the states of layers that keep one; None if there are none.
        states_on: The same for a number of devices; None if these cannot have equal parts.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_model_len: int
    ffn_matrices: int = 3
    has_biases: bool = False
    num_positions: int = 0
    is_tied: bool = False
    dtype_bytes: int = 2
    num_windowed: int = 0
    window: int = 0
    states: StateSizes | None = None
    states_on: Callable[[int], StateSizes | None] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def opt(cls, name: str, num_layers: int, hidden_size: int, num_heads: int) -> Self:
        """A model of the OPT family."""
        return cls(
            name=name,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=hidden_size // num_heads,
            ffn_size=4 * hidden_size,
            vocab_size=50272,
            max_model_len=2048,
            ffn_matrices=2,
            has_biases=True,
            num_positions=2050,
            is_tied=True,
        )

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads the config.json of a model directory. Raises ConfigurationError, one line, if it does not describe a
        decoder of this kind."""
        return cls.from_config(ModelDirectory.open(directory))

    @classmethod
    def from_config(cls, model: ModelDirectory) -> Self:
        """The shape of a model directory that was read."""
        config = _Config(model.path / "config.json", model.config)
        config.refuse_other_kinds()
        is_gpt2, is_opt = model.architecture == "GPT2LMHeadModel", model.architecture == "OPTForCausalLM"
        hidden = config.number("n_embd" if is_gpt2 else "hidden_size")
        heads = config.number("n_head" if is_gpt2 else "num_attention_heads")
        max_len = config.number("n_positions" if is_gpt2 else "max_position_embeddings")
        ffn = {"GPT2LMHeadModel": "n_inner", "OPTForCausalLM": "ffn_dim"}.get(model.architecture, "intermediate_size")
        # Two rows of OPT's table are never used.
        learned = max_len + 2 if is_opt else max_len if is_gpt2 else 0
        num_layers = config.number("n_layer" if is_gpt2 else "num_hidden_layers")
        num_windowed = config.num_windowed(num_layers)
        return cls(
            name=model.name,
            num_layers=num_layers,
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=config.number("num_key_value_heads", heads),
            head_dim=config.number("head_dim", hidden // heads),
            ffn_size=config.number(ffn, 4 * hidden if is_gpt2 else None),
            vocab_size=config.number("vocab_size"),
            max_model_len=max_len,
            ffn_matrices=2 if is_gpt2 or is_opt else 3,
            has_biases=is_gpt2 or is_opt,
            num_positions=learned,
            is_tied=bool(config.values.get("tie_word_embeddings", is_gpt2 or is_opt)),
            dtype_bytes=DTYPE_BYTES.get(str(config.values.get("dtype") or config.values.get("torch_dtype")), 2),
            num_windowed=num_windowed,
            window=config.number("sliding_window") if num_windowed else 0,
            states=state_sizes(model.architecture, model.config),
            states_on=partial(state_sizes, model.architecture, model.config),
        )

    def with_dtype(self, dtype: str) -> Self:
        """The same shape with another type of weights and KV pool, a key of DTYPE_BYTES."""
        return replace(self, dtype_bytes=DTYPE_BYTES[dtype])

    def split(self, num_devices: int) -> Self:
        """The same shape over `num_devices` devices. If there are more devices than heads of keys and values, devices
        hold copies of a head. Raises ConfigurationError if a worker would refuse to split it so."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        states = None if self.states_on is None else self.states_on(num_devices)
        if self.states is not None and states is None:
            raise ConfigurationError(
                f"{num_devices} devices cannot share {self.name}: they must divide the heads of its layers with states"
            )
        if heads % num_devices or (kv_heads % num_devices and num_devices % kv_heads):
            raise ConfigurationError(
                f"{num_devices} devices cannot share {self.name}: they must divide its {heads} attention heads, and "
                f"divide its {kv_heads} heads of key and value or be a multiple of them"
            )
        return replace(self, num_kv_heads=max(kv_heads, num_devices), states=states)

    @property
    def layer_parameters(self) -> int:
        """Parameters of all layers and the last norm, which every token is multiplied with."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        ffn = self.ffn_matrices * self.hidden_size * self.ffn_size
        norms = 2 * self.hidden_size
        biases = 0
        if self.has_biases:
            biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + self.hidden_size
            biases += self.ffn_size + self.hidden_size + 2 * self.hidden_size
        of_states = 0 if self.states is None else self.states.num_layers * self.states.parameters
        mixers = self.num_attending * attention + of_states
        return mixers + self.num_layers * (ffn + norms + biases) + self.hidden_size * (1 + self.has_biases)

    @property
    def num_attending(self) -> int:
        """Layers with keys and values."""
        return self.num_layers if self.states is None else self.states.num_attending

    @property
    def head_parameters(self) -> int:
        """Parameters of the head, which every token that samples is multiplied with."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        tables = (self.vocab_size * (1 if self.is_tied else 2) + self.num_positions) * self.hidden_size
        return self.layer_parameters + tables

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of the keys and values of one token, in all layers."""
        return 2 * self.num_attending * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block on all devices: `block_size` tokens of the layers of one group, or a part of a state."""
        return self.bytes_of(self.cut(block_size)[0], block_size)

    def bytes_of(self, num_layers: int, block_size: int) -> int:
        """Bytes of a block of this number of layers."""
        of_tokens = num_layers * self.slot_bytes // max(self.num_attending, 1) * block_size
        if (states := self.states) is None:
            return of_tokens
        return states.num_ranks * states.block_bytes(of_tokens // states.num_ranks)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a sequence."""
        return 0 if self.states is None else self.states.num_bytes

    def state_blocks(self, block_size: int) -> int:
        """Blocks that hold the state of a sequence."""
        states = self.states
        return 0 if states is None else states.num_blocks(self.block_bytes(block_size) // states.num_ranks)

    def cut(self, block_size: int) -> tuple[int, LayerGroups]:
        """The layers of a group, and the groups, as a worker cuts them: groups of equal bytes, with the most layers a
        group among the cuts that take little memory."""
        return _cut(self, block_size)

    def read_tokens(self, all_tokens: int, in_windows: int) -> float:
        """The mean over layers of the tokens that they read, if windowed layers read `in_windows` of `all_tokens`."""
        return all_tokens - (all_tokens - min(all_tokens, in_windows)) * self.num_windowed / self.num_layers


@cache
def _cut(model: ModelShape, block_size: int) -> tuple[int, LayerGroups]:
    whole = model.num_attending, ONE_GROUP
    cuts = [whole]
    num_tokens = min(_COMPARED_TOKENS, model.max_model_len)
    # The last token of a prompt may have a step of its own, which then computes the token before it, too.
    if model.num_windowed and model.window + 1 < model.max_model_len:
        for layers in range(model.num_attending, 0, -1):
            counts = (model.num_attending - model.num_windowed, model.num_windowed)
            full, windowed = (-(-count // layers) for count in counts)
            cuts.append((layers, LayerGroups(full, windowed, model.window + 1)))
    sizes = [layers * groups.max_blocks(num_tokens, block_size) for layers, groups in cuts]
    cut = next(cut for cut, size in zip(cuts, sizes, strict=True) if size <= _MAX_WASTE * min(sizes))

    def memory_of(cut: tuple[int, LayerGroups]) -> int:
        return model.bytes_of(cut[0], block_size) * cut[1].max_blocks(model.max_model_len, block_size)

    # A block holds at least a part of a state.
    return cut if model.states is None or memory_of(cut) < memory_of(whole) else whole


_OTHER_KINDS = {
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "kv_lora_rank": "latent attention",
    "ssm_state_size": "state-space layers",
}


_MAX_NUMBER = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class _Config:
    path: Path
    values: Mapping[str, Any]

    def number(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_NUMBER:
            raise ConfigurationError(
                f"{self.path}: {name} is {value!r:.40}; it must be a whole number in [1, {_MAX_NUMBER:,}]"
            )
        return value

    def num_windowed(self, num_layers: int) -> int:
        """Layers with a window, by `layer_types`, or all but each `sliding_window_pattern`th layer."""
        if isinstance(kinds := self.values.get("layer_types"), list):
            return cast("list[object]", kinds).count("sliding_attention")
        if self.values.get("sliding_window") and "sliding_window_pattern" in self.values:
            return num_layers - num_layers // self.number("sliding_window_pattern")
        return 0

    def refuse_other_kinds(self) -> None:
        for name, kind in _OTHER_KINDS.items():
            if self.values.get(name):
                raise ConfigurationError(f"{self.path} describes {kind} ({name}), for which there is no cost model")


# Configurations as their authors published them.
MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            ModelShape.opt("opt-125m", 12, 768, 12),
            ModelShape.opt("opt-1.3b", 24, 2048, 32),
            ModelShape.opt("opt-6.7b", 32, 4096, 32),
            ModelShape.opt("opt-13b", 40, 5120, 40),
            ModelShape.opt("opt-30b", 48, 7168, 56),
            ModelShape.opt("opt-66b", 64, 9216, 72),
            ModelShape.opt("opt-175b", 96, 12288, 96),
            ModelShape("llama-13b", 40, 5120, 40, 40, 128, 13824, 32000, 2048),
            ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128256, 131072),
            ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128256, 131072),
        )
    }
)
