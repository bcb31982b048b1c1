"""The rows of the persistent batch, as steps are accepted, launched and finished."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.common.v1.common_pb2 import Constraint
from quire.messages.arrays import encode_int32
from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from quire.model_files.model_source import resolve_model
from quire.rpc.errors import InvalidArgument, QuireError
from quire.worker.v1 import worker_pb2
from tests.support.sampling import make_sampling
from tests.support.steps import int32, make_assign, make_batch, make_changes, make_step
from tests.support.worker_client import make_assign as make_assign_message
from worker_svc.device import runner
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.row_ledger import RowLedger
from worker_svc.device.rows import FailingRows, Rows
from worker_svc.models.registry import load_model
from worker_svc.protocol.step_messages import StepDecoder
from worker_svc.startup import model_geometry
from worker_svc.step import (
    AdmittedStep,
    LogitRules,
    ModelGeometry,
    PoolGeometry,
    ReseedRow,
    RowChanges,
    RowConstraint,
    SetTokens,
    Step,
    WorkerInfo,
    WorkerLimits,
)

BLOCK_SIZE = 4
PROMPT = [1, 2, 3, 4, 5]
TABLE = [10, 11]


def make_ledger(groups: LayerGroups = ONE_GROUP) -> RowLedger:
    pool = PoolGeometry(BLOCK_SIZE, 32, 0, 1, 1, 8, "float32", 64, groups=groups)
    model = ModelGeometry("Tiny", "float32", 50, 24, "cpu")
    return RowLedger(pool, model, WorkerLimits(6, 64, 2, 8, max_adapters=2))


def assigned_ledger() -> RowLedger:
    """A ledger whose row 0 holds PROMPT in TABLE."""
    ledger = make_ledger()
    ledger.admit(make_step(make_changes(assign=[make_assign(0, PROMPT, TABLE)])))
    return ledger


def decode(position: int, row: int = 0) -> Step:
    return make_step(batch=make_batch([row], [1], [position]))


def set_tokens(row: int, position: int, *token_ids: int) -> RowChanges:
    return make_changes(set_tokens=[SetTokens(row, position, np.array(token_ids, np.int32))])


def test_a_block_table_has_an_entry_for_each_group_of_layers_and_entries_are_set_when_they_are_used() -> None:
    ledger = make_ledger(LayerGroups(1, 2, window=5))
    assign = make_assign(0, [0] * 9, [1, 2, 3, 4, 0, 0, 5, 0, 0])
    admitted = ledger.admit(make_step(make_changes(assign=[assign]), make_batch([0], [4], [0], [])))
    assert sorted(admitted.batch_blocks.tolist()) == [1, 2, 3]
    deltas = [(0, 1, 0), (0, 2, 0), (0, 4, 6), (0, 5, 7), (0, 7, 2), (0, 8, 3)]
    admitted = ledger.admit(make_step(make_changes(deltas=deltas), make_batch([0], [5], [4])))
    assert sorted(admitted.batch_blocks.tolist()) == [2, 3, 4, 5, 6, 7]
    with pytest.raises(InvalidArgument, match="to 13 tokens; its block table of 9 blocks holds 12"):
        ledger.admit(make_step(set_tokens(0, 9, 1, 2, 3, 4), make_batch([0], [4], [9])))
    with pytest.raises(InvalidArgument, match="holds block 2 twice among the blocks"):
        ledger.admit(make_step(make_changes(deltas=[(0, 8, 2)]), make_batch([0], [1], [9])))


def test_rows_grow_by_what_they_sample_and_by_what_they_are_given() -> None:
    ledger = make_ledger()
    candidates = make_sampling(num_candidates=4)
    assign = [make_assign(0, PROMPT, TABLE), make_assign(2, [0] * 11, [7, 8, 9]), make_assign(4, [6], [5], candidates)]
    # Row 3 is forked from row 0 and samples from it; row 4 reports candidates, and does not grow.
    batch = make_batch([0, 2, 4], [5, 4, 1], [0, 3, 0], [(0, 0), (3, 0), (4, 4)])
    admitted = ledger.admit(make_step(make_changes(assign=assign, fork=[(0, 3)]), batch))
    assert sorted(admitted.batch_blocks.tolist()) == [5, 7, 8, 10, 11]
    admitted = ledger.admit(make_step(make_changes(deltas=[(3, 1, 20)]), make_batch([0, 3], [1, 1], [5, 5])))
    assert sorted(admitted.batch_blocks.tolist()) == [11, 20]
    ledger.admit(make_step(set_tokens(4, 1, 9), decode(1, row=4).batch))
    # Tables grow in any order, and tokens after the new end are gone.
    ledger.admit(make_step(make_changes(deltas=[(0, 3, 13), (0, 2, 12), (0, 1, 9)])))
    ledger.admit(make_step(set_tokens(0, 2, *[0] * 14)))
    written = ledger.admit(make_step(batch=make_batch([0], [16], [0]))).batch_blocks
    assert sorted(written.tolist()) == [9, 10, 12, 13]
    ledger.admit(make_step(make_changes(release=[0], assign=[make_assign(0, [0] * 24, range(6))])))
    # The token after the last position can be sampled, but not computed.
    ledger.admit(decode(23))
    with pytest.raises(InvalidArgument, match="block table"):
        ledger.admit(decode(24))


NOBODY = "row 3, which holds no sequence"
REFUSED = [
    (make_step(make_changes(fork=[(3, 0)])), NOBODY),
    (make_step(make_changes(reseed=[ReseedRow(3, 1)])), NOBODY),
    (make_step(set_tokens(3, 0, 1)), NOBODY),
    (make_step(make_changes(deltas=[(3, 0, 1)])), NOBODY),
    (decode(0, row=3), "row 3"),
    (make_step(batch=make_batch([0], [5], [0], [(3, 0)])), "row 3"),
    (make_step(make_changes(assign=[make_assign(0, [1], [2])])), "release it first"),
    (make_step(make_changes(deltas=[(0, 3, 12)])), "sets block 3 of row 0, which has only 2"),
    (make_step(set_tokens(0, 6, 7)), "row 0 has 5 tokens"),
    (make_step(set_tokens(0, 2, 7), decode(3).batch), "it has 3"),
    (decode(5), "it has 5"),
    (
        make_step(make_changes(assign=[make_assign(1, PROMPT, [1, 11])]), make_batch([0, 1], [1, 1], [4, 4])),
        "block 11 twice",
    ),
    (make_step(batch=make_batch([0], [3], [0])), "sample after token 3"),
    (
        make_step(make_changes(assign=[make_assign(1, [1, 2], [5])]), make_batch([0], [5], [0], [(1, 0)])),
        "row 1 of 2 tokens",
    ),
]


@pytest.mark.parametrize(("step", "message"), REFUSED)
def test_a_step_that_contradicts_what_rows_hold_is_refused(step: Step, message: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        assigned_ledger().admit(step)
    assert raised.value.violations
    assert message in raised.value.message


def test_only_what_a_forked_row_holds_is_copied() -> None:
    ledger, rows = assigned_ledger(), make_rows()
    rows.apply_row_changes(make_changes(assign=[make_assign(0, PROMPT, TABLE), make_assign(1, [8], [12])]))
    rows.token_ids[0, 5:], rows.block_tables[0, 2:] = 99, 31
    ledger.admit(make_step(make_changes(assign=[make_assign(1, [8], [12])])))
    admitted = ledger.admit(make_step(make_changes(fork=[(0, 3), (1, 4)])))
    assert admitted.max_forked == (5, 2)
    rows.apply_row_changes(admitted.step.row_changes, admitted.max_forked)
    assert rows.token_ids[3].tolist() == [*PROMPT, *[0] * 36]
    assert rows.block_tables[3].tolist() == [*TABLE, *[0] * 8]
    assert (rows.token_ids[4, 0], rows.block_tables[4, 0]) == (8, 12)


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
    st.builds(make_assign_message, SMALL, st.lists(SMALL, max_size=6), st.lists(st.integers(0, 12), max_size=4)),
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
    return [ledger._held, ledger._draws, ledger._num_tokens, ledger._num_blocks, ledger._adapter_loads, ledger._tables]


def admit(decoder: StepDecoder, ledger: RowLedger, request: worker_pb2.StepRequest) -> np.ndarray | QuireError:
    """The blocks that the step writes, or the reason of its refusal."""
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


def assign_adapted(row: int, slot: int | None) -> RowChanges:
    return make_changes(assign=[make_assign(row, PROMPT, TABLE, adapter_slot=slot)])


def load_adapter(ledger: RowLedger, slot: int) -> None:
    ledger.begin_load(slot)
    ledger.end_load(slot, True)


def test_a_row_is_assigned_to_a_loaded_adapter_alone() -> None:
    ledger = make_ledger()
    with pytest.raises(InvalidArgument, match="adapter_slot is 1, in which no adapter is loaded"):
        ledger.admit(make_step(assign_adapted(0, 1)))
    ledger.begin_load(1)
    with pytest.raises(InvalidArgument, match="no adapter is loaded"):
        ledger.admit(make_step(assign_adapted(0, 1)))
    ledger.end_load(1, False)
    with pytest.raises(InvalidArgument, match="no adapter is loaded"):
        ledger.admit(make_step(assign_adapted(0, 1)))
    load_adapter(ledger, 1)
    ledger.admit(make_step(assign_adapted(0, 1)))


def test_rows_of_an_adapter_that_was_replaced_are_computed_no_more() -> None:
    ledger = make_ledger()
    for slot in (0, 1):
        load_adapter(ledger, slot)
    ledger.admit(make_step(assign_adapted(0, 0)))
    ledger.admit(make_step(make_changes(assign=[make_assign(1, PROMPT, [20, 21], adapter_slot=1)], fork=[(0, 2)])))
    ledger.begin_load(0)
    ledger.admit(make_step(batch=make_batch([1], [1], [4])))
    for row in (0, 2):
        with pytest.raises(InvalidArgument, match=f"row {row}, whose adapter is in its slot no more"):
            ledger.admit(decode(4, row))
    ledger.end_load(0, True)
    with pytest.raises(InvalidArgument, match="whose adapter is in its slot no more"):
        ledger.admit(decode(4))
    ledger.admit(make_step(make_changes(release=[0, 2], assign=[make_assign(0, PROMPT, TABLE, adapter_slot=0)])))
    ledger.admit(decode(4))


def test_a_forked_row_has_its_parents_adapter() -> None:
    rows = make_rows()
    rows.apply_row_changes(
        make_changes(assign=[make_assign(0, [1], [8], adapter_slot=4), make_assign(1, [4], [9])], fork=[(0, 3)])
    )
    assert rows.adapter_slots[:4].tolist() == [5, 0, 0, 5]
    rows.apply_row_changes(make_changes(release=[0], assign=[make_assign(0, [1], [8])], fork=[(1, 3)]))
    assert rows.adapter_slots[:4].tolist() == [0, 0, 0, 0]


def make_rows() -> Rows:
    return Rows(7, 40, 10, torch.device("cpu"))


def test_row_changes_apply_in_order() -> None:
    rows = make_rows()
    rows.apply_row_changes(
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
        logprob_token_ids=(named := int32([4, 9])),
        rules=rules,
        constraint=RowConstraint(Constraint(regex="a"), ()),
        prompt_logprobs=4,
        predicted=int32([5, 6]),
        refusal="top_p is 7",
    )
    rows.apply_row_changes(make_changes(assign=[make_assign(0, [1, 1], [1], sampling)], fork=[(0, 6)]))

    def values_of(row: int) -> dict[str, str]:
        taken = rows.sampling.take(np.array([row]))
        return {name: repr(getattr(taken, name)[0]) for name in taken.__slots__}

    copied, empty = values_of(6), values_of(5)
    assert copied == values_of(0)
    # A row that draws reports no candidates.
    assert [name for name, value in copied.items() if value == empty[name]] == ["num_candidates"]
    columns = rows.sampling
    assert (columns.temperature[6], columns.top_k[6], columns.top_p[6], columns.seed[6]) == (0.5, 3, 0.25, 7)
    assert (columns.min_score[6], columns.logprob_token_ids[6]) == (np.float32(np.log(0.125)), named)


def test_a_released_row_keeps_no_object() -> None:
    rows = make_rows()
    sampling = make_sampling(rules=LogitRules(presence_penalty=1.0), refusal="top_p is 7")
    rows.apply_row_changes(make_changes(assign=[make_assign(row, [1], [1], sampling) for row in (0, 1)]))
    rows.apply_row_changes(make_changes(release=[0]))
    columns = rows.sampling
    assert [(columns.has_rules[row], columns.is_refused[row]) for row in (0, 1)] == [(False, False), (True, True)]
    assert (columns.rules[0], columns.refusal[0]) == (None, None)


def test_whoever_samples_from_a_failed_prompt_fails() -> None:
    failed = FailingRows(has_states=False)
    assert not len(failed.failing_samples(make_step(batch=make_batch([3], [4], [0], [])), [3]))
    step = make_step(batch=make_batch([2, 3], [1, 1], [4, 4], [(2, 2), (3, 3), (5, 3)]))
    assert failed.failing_samples(step, ()).tolist() == [False, True, True]


def test_a_row_with_a_failed_prompt_fails_once_where_a_later_step_draws_several_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scheduler sends that step before it can know."""
    monkeypatch.setattr(runner, "find_failed_prompts", lambda plan, values: (0,))
    model = load_model(resolve_model(None), device=torch.device("cpu"), dtype=torch.float32)
    geometry, limits = model_geometry(model, None), WorkerLimits(2, 64, 2, 4, max_passes=4)
    shape = pool_geometry(model, PoolRequest(8, 8, None, 0, 0), None)
    pool = allocate_pool(shape, model.device, model.dtype, with_padding=True)
    model_runner = runner.ModelRunner(model, pool, geometry, limits, multi_step_s=math.inf)
    assign = make_assign(0, PROMPT, [0, 1], make_sampling(prompt_logprobs=1))
    steps = (
        make_step(make_changes(assign=[assign]), make_batch([0], [5], [0])),
        make_step(batch=replace(make_batch([0], [1], [5]), max_drafts=int32([3]), max_passes=4)),
    )
    outputs = [model_runner.launch(AdmittedStep(step, int32(()))).wait() for step in steps]
    assert [output.failed_rows for output in outputs] == [(0,), (0,)]
    assert outputs[1].num_tokens.tolist() == [4]
    assert outputs[1].num_sampled_tokens == 0


def test_the_next_sequence_in_a_row_does_not_fail_however_it_came_there() -> None:
    failed, batch = FailingRows(has_states=False), make_batch([2, 3, 4], [1, 1, 1], [4, 4, 4])
    assert failed.failing_samples(make_step(batch=batch), [3, 4]).tolist() == [False, True, True]
    changes = make_changes(assign=[make_assign(3, [1] * 5, [0])], fork=[(2, 4)])
    assert failed.failing_samples(make_step(changes, batch), ()).tolist() == [False, False, False]
