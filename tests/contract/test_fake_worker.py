"""What the worker without a model adds to the contract: known tokens, and a sharp eye on who holds which block."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.arrays import encode_int32
from quire.rpc.errors import Internal
from tests.support.fake_runner import SharedBlockError, token_at
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.worker_client import StepClient, attached_client, ints, make_assign, make_batch

CONFIG = FakeWorkerConfig(block_size=4, failing_seeds=frozenset([13]))
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(CONFIG)
    await worker.start(f"unix:{tmp_path / 'worker'}")
    yield worker
    await worker.stop()


@pytest.fixture
async def client(worker: FakeWorker, tmp_path: Path) -> AsyncIterator[StepClient]:
    async with attached_client(f"unix:{tmp_path / 'worker'}", 1) as client:
        yield client


async def test_tokens_follow_from_seed_and_position(client: StepClient, worker: FakeWorker) -> None:
    result = await client.run(
        assign=[make_assign(0, PROMPT, [0, 1], seed=7), make_assign(1, [1], [2], seed=8)],
        batch=make_batch([0, 1], [5, 1], [0, 0]),
    )
    assert ints(result.token_ids) == [token_at(7, 5), token_at(8, 1)]
    result = await client.run(batch=make_batch([1, 0], [1, 1], [1, 5]))
    assert ints(result.token_ids) == [token_at(8, 2), token_at(7, 6)]
    assert worker.num_steps == 2


async def test_logprobs_and_candidates_name_the_token_first(client: StepClient) -> None:
    result = await client.run(
        assign=[make_assign(0, PROMPT, [0, 1], logprobs=3), make_assign(1, PROMPT, [2, 3], num_candidates=2)],
        batch=make_batch([0, 1], [5, 5], [0, 0]),
    )
    token_id = token_at(0, 5)
    assert ints(result.token_ids) == [token_id, 0]
    assert ints(result.logprobs[0].top_token_ids) == [token_id, token_id + 1, token_id + 2]
    assert ints(result.candidates[0].token_ids) == [token_id, token_id + 1]


async def test_rows_with_failing_seeds_fail_alone(client: StepClient) -> None:
    result = await client.run(
        assign=[make_assign(0, PROMPT, [0, 1], seed=13), make_assign(1, PROMPT, [2, 3], seed=1)],
        batch=make_batch([0, 1], [5, 5], [0, 0]),
    )
    assert [failure.row for failure in result.failures] == [0]
    assert ints(result.token_ids)[1] == token_at(1, 5)


async def test_a_fork_shares_blocks_until_it_writes(client: StepClient) -> None:
    await client.run(assign=[make_assign(0, PROMPT, [0, 1])], batch=make_batch([0], [5], [0], []))
    result = await client.run(
        cache_operations={"copy": encode_int32([1, 2])},
        fork=encode_int32([0, 1]),
        reseed=[{"row": 1, "seed": 9}],
        block_table_deltas=encode_int32([1, 1, 2]),
        batch=make_batch([0, 1], [1, 1], [4, 4]),
    )
    assert ints(result.token_ids) == [token_at(0, 5), token_at(9, 5)]


async def test_a_write_over_another_rows_tokens_fails_the_step_and_whoever_stops_the_worker() -> None:
    worker = FakeWorker(CONFIG)
    async with attached_client(await worker.start(), 1) as client:
        await client.run(assign=[make_assign(0, PROMPT, [0, 1])], batch=make_batch([0], [5], [0]))
        others = [token_id + 1 for token_id in PROMPT]
        await client.send(client.step(assign=[make_assign(1, others, [2, 1])], batch=make_batch([1], [5], [0])))
        assert isinstance(await client.error(), Internal)
    with pytest.raises(SharedBlockError, match="row 1 writes to block 1"):
        await worker.stop()


async def test_rows_of_an_earlier_session_hold_nothing(client: StepClient, tmp_path: Path) -> None:
    await client.run(assign=[make_assign(0, PROMPT, [0, 1])], batch=make_batch([0], [5], [0]))
    async with attached_client(f"unix:{tmp_path / 'worker'}", 2) as successor:
        result = await successor.run(assign=[make_assign(3, PROMPT, [1, 0])], batch=make_batch([3], [5], [0]))
        assert ints(result.token_ids) == [token_at(0, 5)]
