"""The seam between transformers' models and paged attention: what their attention layers call."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from worker_svc.models.mask_window import window_of
from worker_svc.models.transformers_lengths import max_model_len_of
from worker_svc.models.transformers_refusals import UnsupportedModelError

# Names of attention functions in transformers' registry. Of the first no mask function is known, so that models make
# no masks; the second is for models that do something with them, and its masks are empty; by the masks of the third a
# model tells what its layers see.
PAGED = "quire_paged"
PAGED_WITH_MASKS = "quire_paged_with_masks"
PROBED = "quire_probed"

# The attribute of attention modules that holds what they call.
_HOOK = "quire_attention"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What an attention layer asks for.

    Attributes:
        query: [1, Hq, T, D], rotated.
        key: [1, Hkv, T, D], rotated.
        value: [1, Hkv, T, Dv].
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
"""Returns [1, T, Hq, Dv]."""


def attend_by_hook(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers that calls what `set_hook` gave the module."""
    hook: AttentionHook | None = getattr(module, _HOOK, None)
    if hook is None:
        raise UnsupportedModelError("it makes attention modules while it runs")
    return hook(AttentionCall(module, query, key, value, attention_mask, options)), None


def set_hook(module: nn.Module, hook: AttentionHook) -> None:
    setattr(module, _HOOK, hook)


def clear_hook(module: nn.Module) -> None:
    delattr(module, _HOOK)


def choose_attention(model: PreTrainedModel, name: str) -> None:
    """Makes the model's layers call the function of this name, one of the above."""
    for known in (PAGED, PAGED_WITH_MASKS, PROBED):
        AttentionInterface.register(known, attend_by_hook)
    AttentionMaskInterface.register(PAGED_WITH_MASKS, _empty_mask)
    AttentionMaskInterface.register(PROBED, _probed_mask)
    model.config._attn_implementation = name


def _empty_mask(*, device: torch.device, **_: Any) -> torch.Tensor:
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


class ProbedMask(torch.Tensor):
    """A mask that only says what it would let a token see; `window` is missing if the model made another of it.

    It is worked out when it is asked for: some models make masks for kinds of layers that they do not have.
    """

    window: Callable[[], int | None]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """A slice that leaves nothing out is the mask itself."""
        part: Any = super().__getitem__(index)
        slices = index if isinstance(index, tuple) else (index,)
        if all(isinstance(each, slice) for each in slices) and part.shape == self.shape and hasattr(self, "window"):
            part.window = self.window
        return part


def _probed_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    config: PreTrainedConfig,
    device: torch.device,
    **_: Any,
) -> torch.Tensor:
    mask: Any = torch.zeros(1, 1, q_length, kv_length, dtype=torch.bool, device=device).as_subclass(ProbedMask)
    mask.window = lambda: window_of(mask_function, max_model_len_of(config))
    return mask
