"""Properties of a transformers model that the worker finds by running it: on models of one layer, made to fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from worker_svc.models.transformers.paged import UnsupportedModelError, attend_by_hook, set_hook
from worker_svc.models.transformers.probe import Forward, ProbedModel, Recorder, probe, window_of

VOCAB_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 4, 2, 6
HIDDEN = NUM_HEADS * HEAD_DIM

Change = Callable[[torch.Tensor], torch.Tensor]


def leave(x: torch.Tensor) -> torch.Tensor:
    return x


def shift(x: torch.Tensor) -> torch.Tensor:
    """Adds to each token its predecessor in the second but last dimension."""
    return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[..., :-1, :]


def spread(x: torch.Tensor) -> torch.Tensor:
    return x + x.mean(-2, keepdim=True)


PLACES = ("on_queries", "on_keys", "on_values", "on_attended", "on_hidden", "place")


def make_forward(recorder: Recorder, *, num_calls: int = 1, **how: Any) -> Forward:
    """A model of one attention module; each of PLACES changes the value that it names, `place` the positions."""
    on_queries, on_keys, on_values, on_attended, on_hidden, place = (how.pop(name, leave) for name in PLACES)
    generator = torch.Generator().manual_seed(0)
    tokens_of, places_of = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator), torch.randn(64, HIDDEN)
    module = nn.Module()
    set_hook(module, recorder)

    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = tokens_of[token_ids] + places_of[place(positions)]
        for _ in range(num_calls):
            query = x.view(1, -1, NUM_HEADS, HEAD_DIM).transpose(1, 2)
            key, value = query[:, :NUM_KV_HEADS], query[:, NUM_KV_HEADS:]
            changed = on_queries(query), on_keys(key), on_values(value)
            attended, _weights = attend_by_hook(module, *changed, None, **how)
            x = x + on_attended(attended.flatten(2)[0])
        return on_hidden(x)

    return forward


def probe_made(**how: Any) -> ProbedModel:
    recorder = Recorder()
    return probe(make_forward(recorder, **how), recorder, 1, VOCAB_SIZE, torch.device("cpu"))


def refusal_of(**how: Any) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        probe_made(**how)
    return str(caught.value)


def test_a_layer_shows_what_it_is() -> None:
    (shape,) = probe_made(scaling=0.3, softcap=5.0, sliding_window=7).shapes
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.value_dim) == (4, 2, 6, 6)
    assert (shape.scale, shape.soft_cap, shape.sliding_window, shape.alibi_slopes) == (0.3, 5.0, 7, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_shows_its_sinks(dtype: torch.dtype) -> None:
    sinks = nn.Parameter(torch.tensor([0.5, -2.0, 0.0, 30.0], dtype=dtype))
    assert probe_made(s_aux=sinks).shapes[0].sinks == (0.5, -2.0, 0.0, 30.0)
    assert probe_made(s_aux=None).shapes[0].sinks is None


@pytest.mark.parametrize("depends_on", ["the call", "the tokens"])
def test_sinks_that_are_not_the_same_at_each_call_are_refused(depends_on: str) -> None:
    sinks = torch.zeros(4)

    def change(query: torch.Tensor) -> torch.Tensor:
        sinks.copy_(sinks + 1.0 if depends_on == "the call" else query[0, :, :, 0].sum(dim=-1))
        return query

    assert refusal_of(on_queries=change, s_aux=sinks) == "its attention sinks (s_aux) are not the same at each call"


@pytest.mark.parametrize("change", [shift, spread])
@pytest.mark.parametrize("where", ["on_queries", "on_keys", "on_values", "on_attended", "on_hidden"])
def test_whatever_lets_tokens_reach_each_other_is_refused(where: str, change: Change) -> None:
    assert "tokens reach each other in it by more than attention" in refusal_of(**{where: change})


@pytest.mark.parametrize("where", ["on_queries", "on_keys", "on_values", "place"])
def test_a_number_of_the_token_in_the_batch_is_refused_wherever_it_goes_in(where: str) -> None:
    def number(x: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(x)) if where == "place" else x + torch.arange(x.shape[-2])[:, None]

    assert refusal_of(**{where: number}) == "it ignores the positions that it is given"


def test_layers_that_do_not_attend_are_counted() -> None:
    recorder = Recorder()
    with pytest.raises(UnsupportedModelError, match="1 of its 2 layers attend through"):
        probe(make_forward(recorder), recorder, 2, VOCAB_SIZE, torch.device("cpu"))


def test_attention_modules_that_were_not_there_before_are_refused() -> None:
    def forward(token_ids: torch.Tensor, _positions: torch.Tensor) -> torch.Tensor:
        x = torch.zeros(1, 1, len(token_ids), 8)
        return attend_by_hook(nn.Module(), x, x, x)[0]

    with pytest.raises(UnsupportedModelError, match="it makes attention modules while it runs"):
        probe(forward, Recorder(), 1, VOCAB_SIZE, torch.device("cpu"))


def test_a_model_that_fails_before_it_attends_is_refused_with_its_error() -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise ValueError("no mask was given\nto this model")

    reason = refusal_of(place=fail)
    assert (
        reason == "it fails before it attends through transformers' attention interface (ValueError: no mask was given)"
    )


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"position_bias": torch.ones(4)}, "its attention takes position_bias, which paged attention does not have"),
        ({"s_aux": torch.ones(5)}, "its attention sinks (s_aux) have shape [5]; expected one for each head, [4]"),
        ({"s_aux": torch.ones(1, 4)}, "its attention sinks (s_aux) have shape [1, 4]; expected one for each head, [4]"),
        ({"s_aux": torch.tensor(1.0)}, "its attention sinks (s_aux) have shape []; expected one for each head, [4]"),
        ({"s_aux": 0.5}, "its attention sinks (s_aux) are a float; expected a tensor"),
        ({"is_causal": False}, "its attention is not causal"),
        (
            {"on_keys": lambda key: key[..., :4]},
            "its queries, keys and values are of shapes [1, 4, 4, 6], [1, 2, 4, 4]",
        ),
        ({"on_keys": lambda key: key[:, :1]}, "its queries, keys and values are of shapes [1, 4, 4, 6], [1, 1, 4, 6]"),
    ],
)
def test_a_call_that_paged_attention_cannot_answer_is_refused(how: dict[str, Any], reason: str) -> None:
    assert reason in refusal_of(**how)


@pytest.mark.parametrize("num_positions", [1, 2, 3, 100])
def test_a_causal_mask_has_no_window(num_positions: int) -> None:
    assert window_of(causal_mask_function, num_positions) is None


@pytest.mark.parametrize("window", [1, 2, 7, 50, 99, 100, 101, 4096])
def test_a_sliding_window_is_found_and_one_that_nothing_leaves_is_none(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window), 100) == (window if window < 100 else None)


@pytest.mark.parametrize(
    "mask_function",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(5),
        chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(25, torch.zeros(1, dtype=torch.int64)),
        chunked_causal_mask_function(60, torch.zeros(1, dtype=torch.int64)),
        or_masks(causal_mask_function, lambda batch, head, query, key: key < 10),
        and_masks(causal_mask_function, lambda batch, head, query, key: key % 2 == 0),
        and_masks(causal_mask_function, lambda batch, head, query, key: key < 0),
    ],
)
def test_another_pattern_is_refused(mask_function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        window_of(mask_function, 100)
