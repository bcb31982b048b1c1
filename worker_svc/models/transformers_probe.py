"""What a transformers model is, found out by running it on a few tokens before it serves.

Attention gives zeros in these runs, so that nothing may reach a token from the others. A model in which something does
(a recurrent state, a convolution, attention of its own) would read what is not its sequence's in a flat batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from worker_svc.models.transformers_attention import AttentionCall, LayerShape, ProbedMask
from worker_svc.models.transformers_refusals import UnsupportedModelError, one_line

NUM_TOKENS = 4
# What an attention layer may be told beside what is read below: it changes nothing of what is attended to.
_HARMLESS = {
    "cache_position",
    "deterministic",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids [T], positions [T]) -> hidden states [T, hidden]."""


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The attention layers in the order in which they run."""

    modules: tuple[nn.Module, ...]
    shapes: tuple[LayerShape, ...]
    hidden: torch.Tensor
    """[NUM_TOKENS, hidden], what the head takes."""


@dataclass(slots=True)
class Recorder:
    """The hook of all modules while a model is probed."""

    calls: list[AttentionCall] = field(default_factory=list)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        _, num_heads, num_tokens, _ = call.query.shape
        return call.query.new_zeros(1, num_tokens, num_heads, call.value.shape[-1])


def probe(forward: Forward, recorder: Recorder, num_layers: int, vocab_size: int, device: torch.device) -> ProbedModel:
    """Runs the model thrice.

    Args:
        forward: its base model; all its modules have `recorder` as their hook.
        num_layers: of which each must attend once.

    Raises:
        UnsupportedModelError: it cannot be served.
    """
    tokens = torch.arange(1, NUM_TOKENS + 1, device=device) % vocab_size
    positions = torch.arange(NUM_TOKENS, device=device)
    hidden, calls = _first_run(forward, recorder, tokens, positions)
    modules = tuple(call.module for call in calls)
    if len(calls) != num_layers or len(set(modules)) != num_layers:
        raise UnsupportedModelError(
            f"{len(calls)} of its {num_layers} layers attend through transformers' attention interface"
        )
    shapes = tuple(_shape_of(call) for call in calls)
    if len({(shape.num_kv_heads, shape.head_dim) for shape in shapes}) != 1:
        raise UnsupportedModelError("its layers have keys of different shapes")
    other_start = tokens.clone()
    other_start[0] = (tokens[0] + NUM_TOKENS) % vocab_size
    if not _same(_run(forward, recorder, other_start, positions)[0][1:], hidden[1:]):
        raise UnsupportedModelError("tokens reach each other in it by more than attention (state-space, recurrent)")
    moved, moved_calls = _run(forward, recorder, tokens, positions + NUM_TOKENS)
    if _same(moved, hidden) and all(_same(a.key, b.key) for a, b in zip(calls, moved_calls, strict=True)):
        raise UnsupportedModelError("it does not heed the positions that it is given")
    return ProbedModel(modules, shapes, hidden)


def _first_run(
    forward: Forward, recorder: Recorder, tokens: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, list[AttentionCall]]:
    """Attention of the model's own may fail before it is seen that ours was not called."""
    try:
        return _run(forward, recorder, tokens, positions)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if recorder.calls:
            raise
        raise UnsupportedModelError(
            f"its attention does not go through transformers' attention interface ({one_line(error)})"
        ) from error


def _run(
    forward: Forward, recorder: Recorder, tokens: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, list[AttentionCall]]:
    recorder.calls = []
    return forward(tokens, positions), recorder.calls


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Up to rounding: a product's sums may depend on the values of other lines."""
    tolerance = max(4 * torch.finfo(b.dtype).eps, 1e-4)
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def _shape_of(call: AttentionCall) -> LayerShape:
    options, head_dim = call.options, call.query.shape[-1]
    if call.key.shape != call.value.shape or call.key.shape[-1] != head_dim:
        raise UnsupportedModelError(
            f"its heads differ in size: queries {head_dim}, keys {call.key.shape[-1]}, values {call.value.shape[-1]}"
        )
    for name, value in options.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise UnsupportedModelError(f"its attention takes {name}, which paged attention does not know")
    window = _window_of(call)
    if options.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    scale, soft_cap = options.get("scaling"), options.get("softcap")
    return LayerShape(
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else float(scale),
        sliding_window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
    )


def _window_of(call: AttentionCall) -> int | None:
    """What the mask says, which is what transformers' plain attention obeys; the option where no mask was made."""
    if call.mask is None:
        return call.options.get("sliding_window")
    if isinstance(call.mask, ProbedMask) and (refusal := getattr(call.mask, "refusal", None)) is not None:
        raise refusal
    if not isinstance(call.mask, ProbedMask) or not hasattr(call.mask, "window"):
        raise UnsupportedModelError("it makes an attention mask of its own")
    return call.mask.window
