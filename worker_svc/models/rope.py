"""Rotary position embeddings: the table of cosines and sines for each rope type of transformers' configurations.

The angle of a token depends only on its position, so that keys in the pool stay valid however a prompt is chunked and
whichever sequences share them. The frequencies of two types (dynamic, longrope) depend on the length of the sequence in
transformers. Here they follow from the longest sequence that the worker serves, and all of its sequences have the same.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from worker_svc.models.base import ConfigFields, RotationByLength

# More positions than any model has. It bounds the memory that a wrong configuration can allocate.
MAX_TABLE_LENGTH = 1 << 24
MAX_HEAD_DIM = 1 << 12
_MAX_TABLE_NUMBERS = 1 << 30


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rope section of a configuration.

    Attributes:
        max_positions: config.json's max_position_embeddings.
        original_max_positions: the length of the first training, if scaling extends it.
        rotated_dim: the first dimensions of each head, which are turned.
    """

    rope_type: str
    theta: float
    head_dim: int
    max_positions: int
    original_max_positions: int
    rotated_dim: int
    fields: ConfigFields

    @classmethod
    def read(cls, config: ConfigFields, head_dim: int, *, may_be_partial: bool = False) -> "RopeConfig":
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
        fields = rope_section(config)
        max_positions = config.integer("max_position_embeddings", 2048)
        rope_type = fields.text("rope_type", fields.text("type", "default"))
        rope_type = "longrope" if rope_type == "su" else rope_type
        may_be_partial |= rope_type == "proportional"
        if rope_type not in _INVERSE_FREQUENCIES:
            raise fields.error("rope_type", rope_type, f"one of {', '.join(_INVERSE_FREQUENCIES)}")
        factor = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
        rotated_dim = int(head_dim * factor)
        if factor > 1 or (factor < 1 and not may_be_partial) or not rotated_dim or rotated_dim % 2:
            expected = f"at most 1, for an even number of {head_dim} dimensions" if may_be_partial else "1"
            raise fields.error("partial_rotary_factor", factor, expected)
        theta = fields.number("rope_theta", config.number("rope_theta", 10000.0))
        if theta <= 1:
            raise fields.error("rope_theta", theta, "a number above 1")
        if rope_type == "dynamic" and rotated_dim < 4:
            raise fields.error("rope_type", rope_type, f"another one for head size {head_dim}")
        original = config if config.values.get("original_max_position_embeddings") is not None else fields
        return cls(
            rope_type=rope_type,
            theta=theta,
            head_dim=head_dim,
            max_positions=max_positions,
            original_max_positions=original.integer("original_max_position_embeddings", max_positions),
            rotated_dim=head_dim if rope_type == "proportional" else rotated_dim,
            fields=fields,
        )

    @property
    def score_factor(self) -> float:
        """A factor on the scores of latent attention; 1 unless the section has `mscale_all_dim`."""
        weight = self.fields.values.get("mscale_all_dim")
        if self.rope_type == "default" or not weight:
            return 1.0
        return _magnitude(self.fields.number("factor"), self.fields.number("mscale_all_dim")) ** 2

    @property
    def max_model_len(self) -> int:
        """Positions that the scaled embedding reaches."""
        if self.rope_type in ("linear", "dynamic"):
            return int(self.max_positions * max(1.0, self.fields.number("factor")))
        if self.rope_type == "yarn":
            return max(self.max_positions, int(self.original_max_positions * _yarn_factor(self)))
        return self.max_positions

    @property
    def changes_beyond(self) -> int | None:
        """The length beyond which sequences need another table; None if all lengths have the same table."""
        if self.rope_type == "dynamic":
            length = self.max_positions
        elif self.rope_type == "longrope" and self.fields.values.get("short_factor") != self.fields.values.get(
            "long_factor"
        ):
            length = self.original_max_positions
        else:
            return None
        return length if length < self.max_model_len else None

    def rotation_for(self, length: int, longest: int) -> RotationByLength | None:
        """The rotation of sequences of up to `length` tokens; None if all lengths have the same."""
        original = self.changes_beyond
        if original is None or original >= longest:
            return None
        extended = "extended" if self.rope_type == "longrope" else f"for {length}"
        return RotationByLength(extended if length > original else "original", original, longest, length)

    def cos_sin_table(self, device: torch.device, num_positions: int) -> torch.Tensor:
        """[n, head_dim] float32: cosines, then sines, of each of the first n positions; 1 and 0 for unrotated inputs.

        Args:
            num_positions: n, the length of the longest sequence, from which the table of a type with several follows.
        """
        if num_positions > MAX_TABLE_LENGTH:
            expected = f"at most {MAX_TABLE_LENGTH}, or a --max-model-len of that"
            raise self.fields.error("max_position_embeddings", num_positions, expected)
        if self.head_dim > MAX_HEAD_DIM:
            raise self.fields.error("head_dim", self.head_dim, f"at most {MAX_HEAD_DIM}")
        if num_positions * self.head_dim > _MAX_TABLE_NUMBERS:
            longest = _MAX_TABLE_NUMBERS // self.head_dim
            expected = f"at most {longest} for head size {self.head_dim}, or a --max-model-len of that"
            raise self.fields.error("max_position_embeddings", num_positions, expected)
        positions = torch.arange(num_positions, dtype=torch.float32)[:, None]
        inverse_frequencies, attention_factor = _INVERSE_FREQUENCIES[self.rope_type](self, num_positions)
        angles = positions * inverse_frequencies
        # In place: the table of a long model has gigabytes.
        cos, sin = angles.cos().mul_(attention_factor), angles.sin_().mul_(attention_factor)
        rest = (0, (self.head_dim - self.rotated_dim) // 2)
        return torch.cat((functional.pad(cos, rest, value=1.0), functional.pad(sin, rest)), dim=-1).to(device)


def rope_section(config: ConfigFields) -> ConfigFields:
    """The section about rotary positions; empty if there is none."""
    for name in ("rope_scaling", "rope_parameters"):
        section = config.values.get(name)
        if section is None or section == {}:
            continue
        if isinstance(section, dict) and len(section) == 1 and isinstance(section.get("full_attention"), dict):
            section = section["full_attention"]
        if not isinstance(section, dict) or any(isinstance(value, dict) for value in section.values()):
            raise config.error(name, section, "one set of rope parameters for all layers")
        return ConfigFields(section, f"{config.section}: {name}")
    return ConfigFields({}, config.section)


def _exponents(rope: RopeConfig) -> torch.Tensor:
    return torch.arange(0, rope.rotated_dim, 2, dtype=torch.float32) / rope.rotated_dim


def _frequencies(rope: RopeConfig) -> torch.Tensor:
    return 1.0 / rope.theta ** _exponents(rope)


def _default(rope: RopeConfig, _: int) -> tuple[torch.Tensor, float]:
    return _frequencies(rope), 1.0


def _linear(rope: RopeConfig, _: int) -> tuple[torch.Tensor, float]:
    return _frequencies(rope) / rope.fields.number("factor"), 1.0


def _proportional(rope: RopeConfig, _: int) -> tuple[torch.Tensor, float]:
    """Turns pairs of the whole head, but only the first by more than 0."""
    turned = int(rope.head_dim * rope.fields.number("partial_rotary_factor", 1.0)) // 2
    frequencies = _frequencies(rope) / rope.fields.number("factor", 1.0)
    return frequencies.where(torch.arange(rope.head_dim // 2) < turned, 0), 1.0


def _dynamic(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """NTK scaling that grows with the length."""
    factor = rope.fields.number("factor")
    growth = factor * max(num_positions, rope.max_positions) / rope.max_positions - (factor - 1)
    theta = rope.theta * growth ** (rope.rotated_dim / (rope.rotated_dim - 2))
    return 1.0 / theta ** _exponents(rope), 1.0


def _llama3(rope: RopeConfig, _: int) -> tuple[torch.Tensor, float]:
    """Divides the frequencies of long wavelengths by the factor, keeps short ones, and interpolates between."""
    factor = rope.fields.number("factor")
    low = rope.fields.number("low_freq_factor")
    high = rope.fields.number("high_freq_factor")
    if high <= low:
        raise rope.fields.error("high_freq_factor", high, f"more than low_freq_factor, {low}")
    frequencies = _frequencies(rope)
    rotations = rope.original_max_positions * frequencies / (2 * math.pi)
    kept = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / factor + kept * frequencies, 1.0


def _yarn_factor(rope: RopeConfig) -> float:
    factor = rope.fields.optional_number("factor")
    return rope.max_positions / rope.original_max_positions if factor is None else factor


def _yarn(rope: RopeConfig, _: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, sections 3.2 and 3.4): a ramp over dimensions from interpolation to extrapolation."""
    fields, factor = rope.fields, _yarn_factor(rope)
    frequencies = _frequencies(rope)

    def dimension_of(rotations: float) -> float:
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.rotated_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_of(fields.number("beta_fast", 32)), dimension_of(fields.number("beta_slow", 1))
    if fields.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotated_dim - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(rope.rotated_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    scaled = frequencies / factor * interpolated + frequencies * (1 - interpolated)
    return scaled, _yarn_attention_factor(fields, factor)


def _magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_attention_factor(fields: ConfigFields, factor: float) -> float:
    given = fields.optional_number("attention_factor")
    if given is not None:
        return given
    mscale, mscale_all_dim = fields.values.get("mscale"), fields.values.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return _magnitude(factor, fields.number("mscale")) / _magnitude(factor, fields.number("mscale_all_dim"))
    return _magnitude(factor, 1.0)


def _longrope(rope: RopeConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """LongRoPE: one factor per dimension for lengths up to the original one, another for longer sequences."""
    fields, count = rope.fields, rope.rotated_dim // 2
    short, long = fields.numbers("short_factor", count), fields.numbers("long_factor", count)
    is_long = num_positions > rope.original_max_positions
    factors = long if is_long else short
    # The first name is PhiMoE's.
    attention_factor = fields.optional_number("long_mscale" if is_long else "short_mscale")
    if attention_factor is None:
        attention_factor = fields.optional_number("attention_factor")
    if attention_factor is None:
        factor = _yarn_factor(rope)
        extended = factor > 1 and rope.original_max_positions > 1
        growth = math.log(factor) / math.log(rope.original_max_positions) if extended else 0.0
        attention_factor = math.sqrt(1 + growth)
    return _frequencies(rope) / torch.tensor(factors), attention_factor


_INVERSE_FREQUENCIES: dict[str, Callable[[RopeConfig, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
