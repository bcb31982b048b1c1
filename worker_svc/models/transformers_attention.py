"""The seam between transformers' models and paged attention: what their attention layers call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from worker_svc.layers.attention import PagedAttention
from worker_svc.model_input import ModelInput
from worker_svc.models.mask_window import window_of
from worker_svc.models.transformers_loading import max_model_len_of
from worker_svc.models.transformers_refusals import UnsupportedModelError

# Names of attention functions in transformers' registry. Of the first no mask function is known, so that models make
# no masks; of the second one is, by which a model tells what its layers see.
PAGED = "quire_paged"
PROBED = "quire_probed"

# The attribute of attention modules that holds what they call.
_HOOK = "quire_attention"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What an attention layer asks for.

    Attributes:
        query: [1, Hq, T, D], rotated.
        key, value: [1, Hkv, T, D], the key rotated.
        mask: what the model's mask function gave, or a mask of the model's own.
        options: all that was given by name: scaling, sliding_window, softcap and more.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: Mapping[str, Any]


AttentionHook = Callable[[AttentionCall], torch.Tensor]
"""Returns [1, T, Hq, D]."""


def attend_by_hook(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers that calls what `set_hook` gave the module."""
    return getattr(module, _HOOK)(AttentionCall(module, query, key, value, attention_mask, options)), None


def set_hook(module: nn.Module, hook: AttentionHook) -> None:
    setattr(module, _HOOK, hook)


def clear_hook(module: nn.Module) -> None:
    delattr(module, _HOOK)


def choose_attention(model: PreTrainedModel, name: str) -> None:
    """Makes the model's layers call the function of this name, PAGED or PROBED."""
    AttentionInterface.register(PAGED, attend_by_hook)
    AttentionInterface.register(PROBED, attend_by_hook)
    AttentionMaskInterface.register(PROBED, _probed_mask)
    model.config._attn_implementation = name


class ProbedMask(torch.Tensor):
    """A mask that only says what it would let a token see; `window` is missing if the model made another of it.

    `refusal` is why nothing can be said, which counts only where a layer uses the mask: some models make masks for
    kinds of layers that they do not have.
    """

    window: int | None
    refusal: UnsupportedModelError | None


def _probed_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    config: PreTrainedConfig,
    device: torch.device,
    **_: Any,
) -> torch.Tensor:
    mask = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device).as_subclass(ProbedMask)
    mask.refusal = None
    try:
        mask.window = window_of(mask_function, max_model_len_of(config))
    except UnsupportedModelError as error:
        mask.refusal = error
    return mask


@dataclass(slots=True)
class CurrentStep:
    """What the attention layers work on while a step runs."""

    inputs: ModelInput | None = None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One attention layer, as it showed itself when it was probed.

    Attributes:
        scale: factor on the scores.
        sliding_window: tokens that a token sees, itself included; None for all before it.
        soft_cap: bound of the scores, see `ops.paged_attention`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class PagedLayer:
    """The hook of attention layer number `index` while requests are served."""

    def __init__(self, index: int, shape: LayerShape, step: CurrentStep) -> None:
        self._index = index
        self._step = step
        self._attention = PagedAttention(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
        )

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        inputs = self._step.inputs
        assert inputs is not None, "attention outside a step"
        kv_cache = inputs.kv_caches[self._index]
        # Models may rotate in float32; the pool has one dtype, and one of int8 takes any one.
        dtype = kv_cache.dtype if kv_cache.is_floating_point() else call.value.dtype
        query, key, value = (tensor[0].transpose(0, 1).to(dtype) for tensor in (call.query, call.key, call.value))
        attended = self._attention(query, key, value, kv_cache, inputs.attention)
        return attended.to(call.query.dtype).view(1, *query.shape)
