"""The rows of the persistent batch, as steps are accepted, launched and finished."""

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.arrays import encode_int32
from quire.common.v1.common_pb2 import Constraint
from quire.rpc.errors import InvalidArgument, QuireError
from quire.worker.v1 import worker_pb2
from tests.support.sampling import make_sampling
from tests.support.steps import make_assign, make_batch, make_changes, make_step
from tests.support.worker_client import make_assign as make_assign_message
from worker_svc.device.row_ledger import RowLedger
from worker_svc.device.rows import FailedPrompts, Rows
from worker_svc.protocol.convert import StepDecoder
from worker_svc.step import (
    LogitRules,
    ModelGeometry,
    PoolGeometry,
    ReseedRow,
    RowConstraint,
    SetTokens,
    Step,
    WorkerInfo,
    WorkerLimits,
)

BLOCK_SIZE = 4
PROMPT = [1, 2, 3, 4, 5]
TABLE = [10, 11]


def make_ledger() -> RowLedger:
    pool = PoolGeometry(BLOCK_SIZE, 32, 0, 1, 1, 8, "float32", 64)
    model = ModelGeometry("Tiny", "float32", 50, 24, "cpu")
    return RowLedger(pool, model, WorkerLimits(6, 64, 2, 8))


def assigned_ledger() -> RowLedger:
    """Row 0 holds PROMPT in TABLE."""
    ledger = make_ledger()
    ledger.admit(make_step(make_changes(assign=[make_assign(0, PROMPT, TABLE)])))
    return ledger


def decode(position: int, row: int = 0) -> Step:
    return make_step(batch=make_batch([row], [1], [position]))


def refusal(ledger: RowLedger, step: Step) -> str:
    with pytest.raises(InvalidArgument) as raised:
        ledger.admit(step)
    assert raised.value.violations
    return raised.value.message


def test_a_sequence_grows_by_one_token_a_sample() -> None:
    ledger = assigned_ledger()
    ledger.admit(make_step(batch=make_batch([0], [5], [0])))
    for position in (5, 6, 7):
        ledger.admit(decode(position))
    assert "holds 8" in refusal(ledger, decode(8))


def test_rows_that_hold_nothing_are_refused_wherever_they_are_named() -> None:
    ledger = assigned_ledger()
    for changes in (
        make_changes(fork=[(3, 0)]),
        make_changes(reseed=[ReseedRow(3, 1)]),
        make_changes(set_tokens=[SetTokens(3, 0, np.array([1], np.int32))]),
        make_changes(deltas=[(3, 0, 1)]),
    ):
        assert "row 3, which holds no sequence" in refusal(ledger, make_step(changes))
    assert "row 3" in refusal(ledger, decode(0, row=3))
    batch = make_batch([0], [5], [0], [(3, 0)])
    assert "row 3" in refusal(ledger, make_step(batch=batch))


def test_a_row_must_be_released_before_it_is_assigned_again() -> None:
    ledger = assigned_ledger()
    assert "release it first" in refusal(ledger, make_step(make_changes(assign=[make_assign(0, [1], [2])])))
    ledger.admit(make_step(make_changes(release=[0], assign=[make_assign(0, [1], [2])])))
    assert "it has 1" in refusal(ledger, decode(1))


def test_block_tables_grow_without_gaps_in_any_order() -> None:
    ledger = assigned_ledger()
    refused = make_step(make_changes(deltas=[(0, 3, 12)]))
    assert "sets block 3 of row 0, which has only 2" in refusal(ledger, refused)
    ledger.admit(make_step(make_changes(deltas=[(0, 3, 13), (0, 2, 12), (0, 1, 9)])))
    tokens = SetTokens(0, 5, np.zeros(11, np.int32))
    written = ledger.admit(make_step(make_changes(set_tokens=[tokens]), make_batch([0], [16], [0]))).batch_blocks
    assert sorted(written.tolist()) == [9, 10, 12, 13]


def test_written_blocks_are_those_of_the_new_tokens() -> None:
    ledger = make_ledger()
    changes = make_changes(assign=[make_assign(2, [0] * 11, [7, 8, 9]), make_assign(4, PROMPT, TABLE)])
    written = ledger.admit(make_step(changes, make_batch([4, 2], [1, 4], [4, 3], []))).batch_blocks
    assert sorted(written.tolist()) == [7, 8, 11]


def test_two_rows_cannot_write_one_block() -> None:
    ledger = make_ledger()
    changes = make_changes(assign=[make_assign(0, PROMPT, [1, 2]), make_assign(1, PROMPT, [1, 2])])
    assert "block 2 twice" in refusal(ledger, make_step(changes, make_batch([0, 1], [1, 1], [4, 4])))


def test_a_forked_row_samples_from_its_parent_and_goes_on_alone() -> None:
    ledger = assigned_ledger()
    batch = make_batch([0], [5], [0], [(0, 0), (3, 0)])
    ledger.admit(make_step(make_changes(fork=[(0, 3)]), batch))
    changes = make_changes(deltas=[(3, 1, 20)])
    written = ledger.admit(make_step(changes, make_batch([0, 3], [1, 1], [5, 5]))).batch_blocks
    assert sorted(written.tolist()) == [11, 20]


def test_a_sample_must_follow_the_last_token_of_its_row() -> None:
    ledger = assigned_ledger()
    assert "sample after token 3" in refusal(ledger, make_step(batch=make_batch([0], [3], [0])))
    changes = make_changes(assign=[make_assign(1, [1, 2], [5])])
    batch = make_batch([0], [5], [0], [(1, 0)])
    assert "row 1 of 2 tokens" in refusal(ledger, make_step(changes, batch))


def test_rows_that_report_candidates_do_not_grow() -> None:
    ledger = make_ledger()
    assign = make_assign(0, PROMPT, TABLE, make_sampling(num_candidates=4))
    ledger.admit(make_step(make_changes(assign=[assign]), make_batch([0], [5], [0])))
    assert "it has 5" in refusal(ledger, decode(5))
    ledger.admit(make_step(make_changes(set_tokens=[SetTokens(0, 5, np.array([7], np.int32))]), decode(5).batch))


def test_set_tokens_shortens_a_row_and_leaves_no_gap() -> None:
    ledger = assigned_ledger()
    refused = make_step(make_changes(set_tokens=[SetTokens(0, 6, np.array([7], np.int32))]))
    assert "row 0 has 5 tokens" in refusal(ledger, refused)
    ledger.admit(make_step(make_changes(set_tokens=[SetTokens(0, 2, np.array([7], np.int32))])))
    assert "it has 3" in refusal(ledger, decode(3))


def test_only_what_a_forked_row_holds_is_copied() -> None:
    ledger, rows = assigned_ledger(), make_rows()
    rows.apply(make_changes(assign=[make_assign(0, PROMPT, TABLE), make_assign(1, [8], [12])]))
    rows.token_ids[0, 5:], rows.block_tables[0, 2:] = 99, 31
    ledger.admit(make_step(make_changes(assign=[make_assign(1, [8], [12])])))
    admitted = ledger.admit(make_step(make_changes(fork=[(0, 3), (1, 4)])))
    assert admitted.max_forked == (5, 2)
    rows.apply(admitted.step.row_changes, admitted.max_forked)
    assert rows.token_ids[3].tolist() == [*PROMPT, *[0] * 36]
    assert rows.block_tables[3].tolist() == [*TABLE, *[0] * 8]
    assert (rows.token_ids[4, 0], rows.block_tables[4, 0]) == (8, 12)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_rows_take_no_memory_for_tokens_that_they_do_not_hold() -> None:
    before = resident_bytes()
    rows = Rows(64, 1 << 20, 1 << 16, torch.device("cpu"))
    rows.apply(make_changes(assign=[make_assign(0, PROMPT, TABLE)]))
    # All rows have 272 MiB.
    assert resident_bytes() - before < 64 << 20


def test_a_refused_step_changes_nothing() -> None:
    ledger = assigned_ledger()
    changes = make_changes(
        release=[0],
        assign=[make_assign(0, [9] * 9, [1, 2, 3]), make_assign(1, [1], [4])],
        fork=[(1, 2)],
        set_tokens=[SetTokens(1, 0, np.array([5, 5], np.int32))],
        deltas=[(0, 1, 30), (2, 1, 31)],
    )
    before = (ledger._held.copy(), ledger._num_tokens.copy(), ledger._num_blocks.copy(), ledger._tables.copy())
    refusal(ledger, make_step(changes, make_batch([5], [1], [0])))
    after = (ledger._held, ledger._num_tokens, ledger._num_blocks, ledger._tables)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    written = ledger.admit(make_step(batch=make_batch([0], [5], [0]))).batch_blocks
    assert sorted(written.tolist()) == TABLE


def test_the_token_after_the_last_position_can_be_sampled_but_not_computed() -> None:
    ledger = make_ledger()
    changes = make_changes(assign=[make_assign(0, [0] * 24, range(6))])
    ledger.admit(make_step(changes, make_batch([0], [1], [23])))
    assert "block table" in refusal(ledger, decode(24))


INFO = WorkerInfo(
    worker_generation=1,
    rank=0,
    world_size=1,
    pool=PoolGeometry(2, 12, 3, 1, 1, 4, "float32", 64),
    model=ModelGeometry("TinyForCausalLM", "float32", 9, 8, "cpu"),
    limits=WorkerLimits(4, 10, 2, 3),
)

SMALL = st.integers(0, 4)
ODD = st.sampled_from([-1, 5, 9, 2**31 - 1])


def arrays(columns: int = 1) -> st.SearchStrategy[bytes]:
    """Mostly whole tuples of small numbers, at times an odd number or stray bytes."""
    numbers = st.lists(st.lists(st.one_of(SMALL, SMALL, SMALL, ODD), min_size=columns, max_size=columns), max_size=3)
    whole = numbers.map(lambda tuples: encode_int32([number for each in tuples for number in each]))
    return st.one_of(whole, whole, whole, st.binary(max_size=9))


ASSIGNS = st.lists(
    st.builds(
        make_assign_message,
        SMALL,
        st.lists(SMALL, max_size=6),
        st.lists(st.integers(0, 12), max_size=4),
        temperature=st.sampled_from([0.0, 1.0, float("nan")]),
        min_tokens=st.sampled_from([0, 0, 0, 1]),
        stop_token_ids=st.lists(SMALL),
        logit_bias=st.one_of(st.just({}), st.dictionaries(SMALL | st.just(2**32 - 1), st.floats(width=32))),
        bad_token_sequences=st.one_of(st.just([]), st.lists(st.lists(SMALL, max_size=2), max_size=1)),
    ),
    max_size=3,
)
STEPS = st.builds(
    worker_pb2.StepRequest,
    cache_operations=st.builds(worker_pb2.CacheOperations, swap_out=arrays(2), swap_in=arrays(2), copy=arrays(2)),
    release=arrays(),
    assign=ASSIGNS,
    fork=arrays(2),
    reseed=st.lists(st.builds(worker_pb2.ReseedRow, row=SMALL), max_size=1),
    set_tokens=st.lists(st.builds(worker_pb2.SetTokens, row=SMALL, position=SMALL, token_ids=arrays()), max_size=1),
    block_table_deltas=arrays(3),
    batch=st.builds(
        worker_pb2.Batch, rows=arrays(), num_new_tokens=arrays(), num_computed_tokens=arrays(), samples=arrays(2)
    ),
)


def state_of(ledger: RowLedger) -> list[np.ndarray]:
    return [ledger._held, ledger._draws, ledger._num_tokens, ledger._num_blocks, ledger._tables]


def admit(decoder: StepDecoder, ledger: RowLedger, request: worker_pb2.StepRequest) -> np.ndarray | QuireError:
    """The blocks that the step writes, or why it is refused."""
    try:
        return ledger.admit(decoder.decode(request)).batch_blocks
    except InvalidArgument as error:
        return error


@given(st.lists(STEPS, min_size=1, max_size=4))
def test_a_step_is_taken_whole_or_refused_whole(requests: list[worker_pb2.StepRequest]) -> None:
    decoder, ledger = StepDecoder(INFO), RowLedger(INFO.pool, INFO.model, INFO.limits)
    ledger.admit(decoder.decode(worker_pb2.StepRequest(assign=[make_assign_message(0, [1, 2, 3], [3, 4])])))
    for request in requests:
        before = [each.copy() for each in state_of(ledger)]
        outcome = admit(decoder, ledger, request)
        if isinstance(outcome, QuireError):
            assert outcome.violations
            for old, new in zip(before, state_of(ledger), strict=True):
                np.testing.assert_array_equal(old, new)
        else:
            assert ((outcome >= 0) & (outcome < INFO.pool.num_gpu_blocks)).all()
            assert (ledger._num_tokens[ledger._held] >= 1).all()
            assert (ledger._num_tokens <= INFO.model.max_model_len + 1).all()
            assert (ledger._num_blocks <= ledger._tables.shape[1]).all()


def make_rows() -> Rows:
    return Rows(7, 40, 10, torch.device("cpu"))


def test_row_changes_apply_in_order() -> None:
    rows = make_rows()
    rows.apply(
        make_changes(
            assign=[make_assign(0, [1, 2, 3], [8], make_sampling(seed=4, top_k=9)), make_assign(1, [4], [9])],
            fork=[(0, 3), (1, 0)],
            reseed=[ReseedRow(3, 2**64 - 1)],
            set_tokens=[SetTokens(3, 1, np.array([20, 30], np.int32))],
            deltas=[(3, 0, 12), (3, 1, 13)],
        )
    )
    assert rows.token_ids[3, :3].tolist() == [1, 20, 30]
    assert rows.block_tables[3, :2].tolist() == [12, 13]
    assert rows.sampling.seed[3] == 2**64 - 1
    assert rows.sampling.top_k[3] == 9
    # All parents are read before a child is written.
    assert rows.token_ids[0, 0] == 4
    assert rows.block_tables[0, 0] == 9


def test_every_column_of_the_sampling_table_follows_a_fork() -> None:
    rows, rules = make_rows(), LogitRules(presence_penalty=1.0)
    sampling = make_sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=7,
        logprobs=2,
        rules=rules,
        constraint=RowConstraint(Constraint(regex="a"), ()),
        prompt_logprobs=4,
        refusal="top_p is 7",
    )
    rows.apply(make_changes(assign=[make_assign(0, [1, 1], [1], sampling)], fork=[(0, 6)]))
    (copied,) = zip(
        *(getattr(rows.sampling.take(np.array([6])), name) for name in rows.sampling.__slots__), strict=True
    )
    assert copied == (0.5, 3, 0.25, 0.125, 7, True, 2, 0, True, rules, True, 2, True, 4, True, "top_p is 7")


def test_a_released_row_keeps_no_object() -> None:
    rows = make_rows()
    sampling = make_sampling(rules=LogitRules(presence_penalty=1.0), refusal="top_p is 7")
    rows.apply(make_changes(assign=[make_assign(row, [1], [1], sampling) for row in (0, 1)]))
    rows.apply(make_changes(release=[0]))
    columns = rows.sampling
    assert [(columns.has_rules[row], columns.is_refused[row]) for row in (0, 1)] == [(False, False), (True, True)]
    assert (columns.rules[0], columns.refusal[0]) == (None, None)


def test_whoever_samples_from_a_failed_prompt_fails() -> None:
    failed = FailedPrompts()
    assert not len(failed.failing_samples(make_step(batch=make_batch([3], [4], [0], [])), [3]))
    step = make_step(batch=make_batch([2, 3], [1, 1], [4, 4], [(2, 2), (3, 3), (5, 3)]))
    assert failed.failing_samples(step, ()).tolist() == [False, True, True]


def test_a_prompt_fails_in_the_step_that_scores_it() -> None:
    step = make_step(batch=make_batch([2, 3], [1, 4], [4, 0], [(2, 2), (3, 3)]))
    assert FailedPrompts().failing_samples(step, [3]).tolist() == [False, True]


def test_the_next_sequence_in_a_row_does_not_fail_however_it_came_there() -> None:
    failed, batch = FailedPrompts(), make_batch([2, 3, 4], [1, 1, 1], [4, 4, 4])
    assert failed.failing_samples(make_step(batch=batch), [3, 4]).tolist() == [False, True, True]
    changes = make_changes(assign=[make_assign(3, [1] * 5, [0])], fork=[(2, 4)])
    assert failed.failing_samples(make_step(changes, batch), ()).tolist() == [False, False, False]
