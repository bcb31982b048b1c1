"""Whatever bytes a step holds, it is taken or refused with a typed error, and a refused one changes nothing."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.arrays import encode_int32
from quire.rpc.errors import InvalidArgument, QuireError
from quire.worker.v1 import worker_pb2
from tests.support.worker_client import make_assign
from worker_svc.info import ModelGeometry, PoolGeometry, WorkerInfo, WorkerLimits
from worker_svc.protocol.convert import StepDecoder
from worker_svc.protocol.row_ledger import RowLedger

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
        make_assign,
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
        return ledger.admit(decoder.decode(request))
    except InvalidArgument as error:
        return error


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=4))
def test_a_step_is_taken_whole_or_refused_whole(requests: list[worker_pb2.StepRequest]) -> None:
    decoder, ledger = StepDecoder(INFO), RowLedger(INFO.pool, INFO.model, INFO.limits)
    ledger.admit(decoder.decode(worker_pb2.StepRequest(assign=[make_assign(0, [1, 2, 3], [3, 4])])))
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
