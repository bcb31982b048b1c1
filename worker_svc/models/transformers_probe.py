"""What a transformers model is, found out by running it on a few tokens before it serves.

In these runs attention gives each token its own value, so that nothing may reach a token from the others. A model in
which something does (a recurrent state, a convolution, attention of its own) would read what is not its sequence's in a
flat batch. Nor may anything depend on the place of a token in the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from worker_svc.models.transformers_attention import AttentionCall, ProbedMask
from worker_svc.models.transformers_paged import LayerShape
from worker_svc.models.transformers_refusals import UnsupportedModelError, one_line

NUM_TOKENS = 4
# Each token has other neighbours in it, and none is where it was.
_OTHER_ORDER = (2, 0, 3, 1)
# What an attention layer may be told beside what is read below: it changes nothing of what is attended to.
_HARMLESS = {
    "alibi_slopes",
    "cache_position",
    "deterministic",
    "dropout",
    "is_causal",
    "needs_exact_keys",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "s_aux",
    "scaling",
    "sliding_window",
    "softcap",
    "use_cache",
}

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(token ids [T], positions [T]) -> hidden states [T, hidden]."""


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The calls of attention in the order in which they come."""

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
        own = call.value.to(call.query.dtype).transpose(1, 2)
        return own.repeat_interleave(call.query.shape[1] // own.shape[2], dim=2)


def probe(forward: Forward, recorder: Recorder, num_layers: int, vocab_size: int, device: torch.device) -> ProbedModel:
    """Runs the model thrice.

    Args:
        forward: its base model; all its modules have `recorder` as their hook.
        num_layers: of which each must attend, all equally often.

    Raises:
        UnsupportedModelError: it cannot be served.
    """
    tokens = torch.arange(1, NUM_TOKENS + 1, device=device) % vocab_size
    positions = torch.arange(NUM_TOKENS, device=device)
    first = _first_run(forward, recorder, tokens, positions)
    if not first.calls or len(first.calls) % num_layers:
        raise UnsupportedModelError(
            f"{len(first.calls)} of its {num_layers} layers attend through transformers' attention interface"
        )
    shapes = tuple(_shape_of(call) for call in first.calls)
    other_start = tokens.clone()
    other_start[0] = (tokens[0] + NUM_TOKENS) % vocab_size
    rest = torch.arange(1, NUM_TOKENS, device=device)
    started = _run(forward, recorder, other_start, positions)
    if not _same(started.lines(rest), first.lines(rest)):
        raise UnsupportedModelError("tokens reach each other in it by more than attention (state-space, recurrent)")
    order = torch.tensor(_OTHER_ORDER, device=device)
    reordered = _run(forward, recorder, tokens[order], positions[order])
    if not _same(reordered.tensors, first.lines(order)):
        raise UnsupportedModelError("it does not heed the positions that it is given")
    if started.sinks != first.sinks or reordered.sinks != first.sinks:
        raise UnsupportedModelError("its attention sinks (s_aux) are not the same at each call")
    return ProbedModel(tuple(call.module for call in first.calls), shapes, first.hidden)


def _first_run(forward: Forward, recorder: Recorder, tokens: torch.Tensor, positions: torch.Tensor) -> "_Run":
    """Attention of the model's own may fail, for want of a mask, before it is seen that ours was not called."""
    try:
        return _run(forward, recorder, tokens, positions)
    except (UnsupportedModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if recorder.calls:
            raise
        raise UnsupportedModelError(
            f"it fails before it attends through transformers' attention interface ({one_line(error)})"
        ) from error


def _run(forward: Forward, recorder: Recorder, tokens: torch.Tensor, positions: torch.Tensor) -> "_Run":
    recorder.calls = []
    hidden = forward(tokens, positions)
    return _Run(hidden, recorder.calls, [_sinks_of(call) for call in recorder.calls])


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run of the model gave.

    Attributes:
        hidden: [T, hidden].
        sinks: what each call was given then; the tensors may change.
    """

    hidden: torch.Tensor
    calls: list[AttentionCall]
    sinks: list[tuple[float, ...] | None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that a token came to, [T, ...] each: what attention was asked, and the hidden states."""
        asked = (tensor for call in self.calls for tensor in (call.query, call.key, call.value))
        return [self.hidden, *(tensor[0].transpose(0, 1) for tensor in asked)]

    def lines(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The same, of these tokens."""
        return [tensor[indices] for tensor in self.tensors]


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(_close, ours, theirs))


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Up to rounding: a product's sums may depend on the values of other lines."""
    if a.shape != b.shape:
        return False
    tolerance = max(4 * torch.finfo(b.dtype).eps, 1e-4)
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def _shape_of(call: AttentionCall) -> LayerShape:
    options, head_dim = call.options, call.query.shape[-1]
    if call.key.shape[-1] != head_dim or call.key.shape[:3] != call.value.shape[:3]:
        raise UnsupportedModelError(
            f"its queries, keys and values are of shapes {list(call.query.shape)}, {list(call.key.shape)} and "
            f"{list(call.value.shape)}"
        )
    for name, value in options.items():
        empty = isinstance(value, torch.Tensor) and value.numel() == 0
        if name not in _HARMLESS and value is not None and value is not False and not empty:
            raise UnsupportedModelError(f"its attention takes {name}, which paged attention does not know")
    window = _window_of(call)
    if options.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    scale, soft_cap, slopes = options.get("scaling"), options.get("softcap"), options.get("alibi_slopes")
    return LayerShape(
        num_heads=call.query.shape[1],
        num_kv_heads=call.key.shape[1],
        head_dim=head_dim,
        value_dim=call.value.shape[-1],
        scale=head_dim**-0.5 if scale is None else float(scale),
        sliding_window=window,
        soft_cap=None if soft_cap is None else float(soft_cap),
        alibi_slopes=None if slopes is None else tuple(slopes),
        sinks=_sinks_of(call),
        needs_exact_keys=bool(options.get("needs_exact_keys")),
    )


def _sinks_of(call: AttentionCall) -> tuple[float, ...] | None:
    sinks, num_heads = call.options.get("s_aux"), call.query.shape[1]
    if sinks is None:
        return None
    if not isinstance(sinks, torch.Tensor):
        raise UnsupportedModelError(f"its attention sinks (s_aux) are a {type(sinks).__name__}; expected a tensor")
    if sinks.shape != (num_heads,):
        raise UnsupportedModelError(
            f"its attention sinks (s_aux) have shape {list(sinks.shape)}; expected one for each head, [{num_heads}]"
        )
    return tuple(sinks.float().tolist())


def _window_of(call: AttentionCall) -> int | None:
    """What the mask says, which is what transformers' plain attention obeys; the option where no mask was made."""
    if call.mask is None:
        return call.options.get("sliding_window")
    if not isinstance(call.mask, ProbedMask) or not hasattr(call.mask, "window"):
        raise UnsupportedModelError("it makes an attention mask of its own")
    return call.mask.window()
