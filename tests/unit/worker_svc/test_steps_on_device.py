"""What a step does on a GPU between its messages never waits for what the GPU computes.

On torch's meta device there are no values, so that whatever would read one raises: an item, a mask, the places of what
is not zero."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampling import make_sampling
from tests.support.steps import int32, make_assign, make_batch, make_changes
from worker_svc.device.batch import build_model_input, pad_batch
from worker_svc.device.graph_shapes import GraphShape
from worker_svc.device.rows import Rows
from worker_svc.device.static_input import StaticInput
from worker_svc.sampling.candidates import gather_candidates
from worker_svc.sampling.history import History
from worker_svc.sampling.logit_rules import apply_logit_rules
from worker_svc.sampling.logprobs import gather_logprobs
from worker_svc.sampling.sampler import draw
from worker_svc.steps import LogitRules, SetTokens

META = torch.device("meta")
BLOCK_SIZE, NUM_COLUMNS, VOCAB = 16, 8, 1000
RULES = LogitRules(
    presence_penalty=0.5,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    bias_token_ids=int32([3, 4]),
    bias_values=np.array([1, 2], np.float32),
    allowed_token_ids=int32([1, 2, 3, 4]),
    bad_sequences=(int32([3]), int32([1, 2, 3])),
    min_tokens=9,
    stop_token_ids=int32([2]),
)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 5},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "logprobs": 3},
    {"rules": RULES, "logprobs": 0},
    {"num_candidates": 4},
    {"num_candidates": 4, "rules": RULES},
]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Rows:
    """One of each kind, with three tokens, and one that pads."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    rows = Rows(len(KINDS) + 1, NUM_COLUMNS * BLOCK_SIZE, NUM_COLUMNS, META)
    rows.hold_padding(len(KINDS), 5)
    samplings = (make_sampling(**kind) for kind in KINDS)
    assign = [make_assign(row, [1, 2, 3], [0], sampling) for row, sampling in enumerate(samplings)]
    rows.apply(make_changes(assign=assign))
    return rows


def test_changes_of_rows_wait_for_nothing(rows: Rows) -> None:
    changes = make_changes(fork=[(0, 1)], set_tokens=[SetTokens(2, 1, int32([9, 9]))], deltas=[(0, 1, 4)])
    rows.apply(changes)


@pytest.mark.parametrize("new", [1, 2])
def test_the_input_of_a_model_waits_for_nothing(rows: Rows, new: int) -> None:
    batch = make_batch(range(4), [new] * 4, [3 - new] * 4)
    inputs = build_model_input(batch, rows, (), BLOCK_SIZE)
    assert inputs.token_ids.shape == inputs.attention.slot_mapping.shape == (4 * new,)
    assert inputs.attention.block_tables.shape == (4, 1)


def test_the_input_of_a_graph_waits_for_nothing(rows: Rows) -> None:
    batch = pad_batch(make_batch(range(5), [1] * 5, [2] * 5), 8, len(KINDS))
    static = StaticInput.allocate(16, NUM_COLUMNS, (), META)
    static.fill(build_model_input(batch, rows, (), BLOCK_SIZE))
    assert static.view(GraphShape(8, 128)).attention.block_tables.shape == (8, NUM_COLUMNS)


@pytest.mark.parametrize("places", [[*range(len(KINDS))], *([place] for place in range(len(KINDS))), [2, 2], [1, 6]])
def test_sampling_waits_for_nothing(rows: Rows, places: list[int]) -> None:
    columns, positions = rows.sampling.take(np.array(places)), np.full(len(places), 3)
    logits = torch.empty(len(places), VOCAB, device=META)
    history = History(rows.token_ids, np.array(places), rows.prompts.num_tokens[places], positions)
    apply_logit_rules(logits, columns, history)
    drawn = draw(logits, columns, positions)
    logprobs = gather_logprobs(logits, drawn.token_ids, columns)
    candidates = gather_candidates(logits, columns)
    rows.append(torch.zeros(len(places), dtype=torch.int64, device=META), drawn.token_ids, drawn.token_ids)
    assert (drawn.token_ids.shape, drawn.token_ids.dtype) == ((len(places),), torch.int64)
    asked = [make_sampling(**KINDS[place]) for place in places]
    assert (logprobs is not None) == any(each.logprobs is not None for each in asked)
    assert (candidates is not None) == any(each.num_candidates is not None for each in asked)
