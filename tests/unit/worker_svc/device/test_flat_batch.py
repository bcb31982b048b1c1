"""Compares the flat batch with a construction token by token."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.steps import make_assign, make_batch, make_changes
from worker_svc.device.flat_batch import (
    Layout,
    find_lone_tokens,
    finite_tokens,
    input_on_device,
    input_on_host,
    non_finite_chunks,
    plan_samples,
    sample_places,
    split_outputs,
)
from worker_svc.device.kv_pool import LayerCaches
from worker_svc.device.rows import Rows
from worker_svc.models.base import ModelInput

BLOCK_SIZE = 4
NUM_ROWS, MAX_LEN, MAX_BLOCKS = 7, 40, 10


def make_rows(num_groups: int = 1) -> Rows:
    return Rows(NUM_ROWS, MAX_LEN, MAX_BLOCKS, torch.device("cpu"), num_groups)


def random_sequences(generator: np.random.Generator) -> list[tuple[list[int], list[int]]]:
    """Tokens and block table of each row; blocks are in random order."""
    block_ids = generator.permutation(200)
    sequences = []
    for row in range(NUM_ROWS):
        length = int(generator.integers(1, MAX_LEN))
        tokens = generator.integers(0, 1000, length).tolist()
        sequences.append((tokens, block_ids[row * 10 : row * 10 + -(-length // BLOCK_SIZE)].tolist()))
    return sequences


@pytest.mark.parametrize("most_new", [1, MAX_LEN])
@pytest.mark.parametrize("build", [input_on_host, input_on_device])
def test_the_batch_is_that_of_a_loop_over_tokens(build: Callable[..., ModelInput], most_new: int) -> None:
    generator = np.random.default_rng(8)
    for _ in range(30):
        rows, sequences = make_rows(), random_sequences(generator)
        assign = [make_assign(row, tokens, table) for row, (tokens, table) in enumerate(sequences)]
        rows.apply_row_changes(make_changes(assign=assign))
        chosen = generator.permutation(NUM_ROWS)[: int(generator.integers(1, NUM_ROWS + 1))].tolist()
        computed = [int(generator.integers(0, len(sequences[row][0]))) for row in chosen]
        new = [
            min(int(generator.integers(1, len(sequences[row][0]) - done + 1)), most_new)
            for row, done in zip(chosen, computed, strict=True)
        ]
        inputs = build(Layout.from_batch(make_batch(chosen, new, computed)), rows, LayerCaches(()), BLOCK_SIZE)
        token_ids, positions, slots, starts = [], [], [], [0]
        for row, count, done in zip(chosen, new, computed, strict=True):
            tokens, table = sequences[row]
            for position in range(done, done + count):
                token_ids.append(tokens[position])
                positions.append(position)
                slots.append(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(len(token_ids))
        lengths = [done + count for done, count in zip(computed, new, strict=True)]
        (attention,) = inputs.groups
        assert inputs.token_ids.tolist() == token_ids
        assert inputs.positions.tolist() == positions
        assert attention.slot_mapping.tolist() == slots
        assert attention.query_start_loc.tolist() == starts
        assert attention.seq_lens.tolist() == lengths
        assert attention.max_query_len == max(new)
        assert attention.max_seq_len == max(lengths)
        assert attention.block_tables.shape == (len(chosen), -(-max(lengths) // BLOCK_SIZE))
        for line, row, length in zip(attention.block_tables.tolist(), chosen, lengths, strict=True):
            used = -(-length // BLOCK_SIZE)
            assert line[:used] == sequences[row][1][:used]
        assert inputs.token_ids.dtype == inputs.positions.dtype == attention.slot_mapping.dtype == torch.int64
        assert attention.block_tables.dtype == attention.seq_lens.dtype == torch.int32
        assert attention.query_start_loc.dtype == torch.int32


@pytest.mark.parametrize("build", [input_on_host, input_on_device])
def test_each_group_of_layers_has_its_own_blocks(build: Callable[..., ModelInput]) -> None:
    rows, cache = make_rows(num_groups=3), torch.empty(0)
    assign = [make_assign(row, [0] * 9, [10 * row + index for index in range(9)]) for row in (0, 1)]
    rows.apply_row_changes(make_changes(assign=assign, deltas=[(1, 4, 90)]))
    layout = Layout.from_batch(make_batch([1, 0], [2, 1], [3, 8]))
    inputs = build(layout, rows, LayerCaches((cache,) * 4, (2, 0, 1, 1)), BLOCK_SIZE)
    tables = [[[10, 13, 16], [0, 3, 6]], [[11, 90, 17], [1, 4, 7]], [[12, 15, 18], [2, 5, 8]]]
    assert [each.block_tables.tolist() for each in inputs.groups] == tables
    places = ((0, 0, 3), (0, 1, 0), (1, 2, 0))
    slots = [[table[row][block] * BLOCK_SIZE + offset for row, block, offset in places] for table in tables]
    assert [each.slot_mapping.tolist() for each in inputs.groups] == slots
    assert all(each.slot_mapping.is_contiguous() and each.block_tables.is_contiguous() for each in inputs.groups)
    assert [each is inputs.groups[group] for each, group in zip(inputs.attention, (2, 0, 1, 1), strict=True)] == [
        True
    ] * 4


def test_rows_sample_after_their_last_tokens_and_share_the_logits_of_one_row() -> None:
    plan = plan_samples(make_batch([4, 0, 2], [3, 1, 2], [0, 9, 5], [(2, 2), (4, 4)]))
    assert (plan.rows.tolist(), plan.logit_tokens.tolist(), plan.positions.tolist()) == ([2, 4], [5, 2], [7, 3])
    assert plan.logit_of_row is None
    plan = plan_samples(make_batch([4, 0], [3, 1], [0, 9], [(4, 4), (0, 0), (6, 4)]))
    assert plan.logit_of_row is not None
    assert plan.logit_tokens.tolist() == [2, 3]
    assert plan.logit_of_row.tolist() == [0, 1, 0]
    assert plan.positions.tolist() == [3, 10, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_that_sample_nothing_are_reported_where_a_token_is_not_finite(dtype: torch.dtype) -> None:
    batch = make_batch([4, 2, 7, 1], [3, 1, 2, 2], [0, 9, 4, 0], [(2, 2), (1, 1)])
    # Padding follows the tokens of the batch.
    hidden = torch.full((10, 64), 60_000.0).to(dtype)
    hidden[8:] = torch.nan
    finite = finite_tokens(batch, hidden)
    assert finite is not None
    assert non_finite_chunks(batch, finite.numpy()) == ()
    for token, found in [(0, (4,)), (2, (4,)), (3, ()), (4, (7,)), (7, ())]:
        for value in (torch.nan, torch.inf, -torch.inf):
            spoilt = hidden.clone()
            spoilt[token, 5] = value
            finite = finite_tokens(batch, spoilt)
            assert finite is not None
            assert non_finite_chunks(batch, finite.numpy()) == found


def test_a_step_in_which_every_row_samples_is_not_looked_at() -> None:
    batch = make_batch([0, 3], [1, 5], [4, 0])
    assert finite_tokens(batch, torch.full((6, 4), torch.nan)) is None


def test_output_tokens_of_a_chunk_are_entries_of_one_token() -> None:
    # Rows 0 and 1 have prompts of 10 tokens, row 2 of 4.
    num_prompt = np.array([10, 10, 4])
    batch = make_batch([1, 0, 2], [5, 1, 3], [8, 12, 4], [(0, 0), (1, 1)])
    split = split_outputs(batch, num_prompt)
    assert split is not None
    entries, places = split
    assert entries.rows.tolist() == [1, 1, 1, 1, 0, 2, 2, 2]
    assert entries.num_new_tokens.tolist() == [2, 1, 1, 1, 1, 1, 1, 1]
    assert entries.num_computed_tokens.tolist() == [8, 10, 11, 12, 12, 4, 5, 6]
    assert places.tolist() == [4, 3]
    plan = plan_samples(entries, places)
    assert (plan.rows.tolist(), plan.positions.tolist()) == ([0, 1], [13, 13])
    # Known sample places are places of the original batch.
    again = split_outputs(batch, num_prompt, sample_places(batch))
    assert again is not None
    assert again[1].tolist() == [4, 3]


@pytest.mark.parametrize(("new", "computed"), [([4, 1], [0, 9]), ([1, 1], [12, 3]), ([10, 2], [0, 1])])
def test_prompts_and_decodes_are_not_split(new: list[int], computed: list[int]) -> None:
    assert split_outputs(make_batch([0, 1], new, computed), np.array([10, 3])) is None


def test_a_token_of_a_prompt_that_comes_by_itself_is_found_unless_it_is_the_first() -> None:
    num_prompt = np.array([10, 10, 10, 10, 1])
    lone = find_lone_tokens(make_batch([0, 1, 2, 3, 4], [1, 2, 1, 1, 1], [9, 4, 10, 0, 0]), num_prompt)
    assert lone is not None
    assert lone.tolist() == [True, False, False, False, False]
    assert find_lone_tokens(make_batch([1, 2], [2, 1], [4, 10]), num_prompt) is None
