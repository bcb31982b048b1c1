"""Behaviour of every worker that schedulers rely on, by raw messages. The fake worker is the same service."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.common.v1.common_pb2 import Constraint
from quire.messages.arrays import encode_int32
from quire.rpc.errors import FailedPrecondition, InvalidArgument
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.preparation import NUM_KEPT
from tests.support.sampling import make_row_sampling
from tests.support.worker_client import (
    StepClient,
    attach_request,
    attached_client,
    ints,
    make_assign,
    make_batch,
    worker_stub,
)
from tests.support.worker_server import running_worker
from worker_svc.sampling.constraints import MIN_KEPT

PROMPT = [1, 2, 3]
HASHES = bytes(range(32)) + bytes(range(32, 64))


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[str]:
    async with running_worker(tmp_path) as address:
        yield address


@pytest.fixture
async def client(address: str) -> AsyncIterator[StepClient]:
    async with attached_client(address, 1) as client:
        yield client


async def prefill(client: StepClient, row: int = 0, first_block: int = 0) -> int:
    """Puts PROMPT into a row with blocks for 8 tokens or more and returns the token that follows it."""
    blocks = range(first_block, first_block + -(-8 // client.info.pool.block_size))
    result = await client.run(assign=[make_assign(row, PROMPT, blocks)], batch=make_batch([row], [len(PROMPT)], [0]))
    return ints(result.token_ids)[0]


def decode_batch(position: int, row: int = 0) -> worker_pb2.Batch:
    """Computes the row's token at `position` and samples the next."""
    return make_batch([row], [1], [position])


async def test_a_stream_that_does_not_begin_with_attach_is_refused(address: str) -> None:
    async with worker_stub(address) as stub:
        client = StepClient(stub)
        await client.send(worker_pb2.StepRequest(step_id=1))
        assert isinstance(await client.error(), FailedPrecondition)


@pytest.mark.parametrize(
    ("request_message", "error"), [(attach_request(2), FailedPrecondition), (None, InvalidArgument)]
)
async def test_a_message_that_attaches_again_or_holds_nothing_is_refused(
    client: StepClient, request_message: worker_pb2.RunRequest | None, error: type[Exception]
) -> None:
    await prefill(client)
    await client.write(request_message or worker_pb2.RunRequest())
    assert isinstance(await client.error(), error)


async def test_a_higher_epoch_ends_the_session_before_and_releases_its_rows(address: str) -> None:
    async with attached_client(address, 7) as old:
        await prefill(old)
        async with attached_client(address, 8) as new:
            assert isinstance(await old.error(), FailedPrecondition)
            await new.send(new.step(batch=decode_batch(len(PROMPT))))
            assert isinstance(await new.error(), InvalidArgument)


async def test_a_step_out_of_order_is_refused(client: StepClient) -> None:
    """tests/unit/worker_svc/protocol/test_session.py also has steps of another incarnation."""
    await prefill(client)
    step = client.step(batch=decode_batch(3))
    step.step_id = 3
    await client.send(step)
    assert isinstance(await client.error(), FailedPrecondition)


BAD_STEPS: list[dict[str, object]] = [
    {"batch": make_batch([2], [1], [0])},
    {"release": b"abc"},
    {"cache_operations": {"swap_out": encode_int32([0, 1 << 24])}},
    {"assign": [make_assign(1, [1 << 24], [])]},
]
"""One fault of each kind: tests/unit/worker_svc has all others (protocol/test_step_messages.py,
device/test_rows.py)."""


@pytest.mark.parametrize("fields", BAD_STEPS)
async def test_a_step_that_contradicts_itself_or_the_worker_is_refused(
    client: StepClient, fields: dict[str, object]
) -> None:
    await prefill(client)
    await client.send(client.step(**fields))
    error = await client.error()
    assert isinstance(error, InvalidArgument)
    assert error.violations


async def test_rows_that_search_report_candidates_and_go_on_with_what_is_chosen(client: StepClient) -> None:
    """Two beams of one prompt; the second choice of the first beam then takes the second beam's row."""
    width = client.info.pool.block_size
    prompt = [index % 7 for index in range(width)]
    result = await client.run(
        assign=[make_assign(0, prompt, [0], num_candidates=4)],
        fork=encode_int32([0, 1]),
        batch=make_batch([0], [width], [0], [(0, 0), (1, 0)]),
    )
    first, second = result.candidates
    assert (first.row, second.row, first.token_ids) == (0, 1, second.token_ids)
    assert ints(result.token_ids) == [0, 0]
    best = ints(first.token_ids)[:2]
    result = await client.run(
        set_tokens=[{"row": row, "position": width, "token_ids": encode_int32([best[row]])} for row in (0, 1)],
        block_table_deltas=encode_int32([0, 1, 1, 1, 1, 2]),
        batch=make_batch([0, 1], [1, 1], [width, width]),
    )
    chosen = ints(result.candidates[0].token_ids)[:2]
    result = await client.run(
        cache_operations={"copy": encode_int32([1, 3])},
        fork=encode_int32([0, 1]),
        set_tokens=[{"row": row, "position": width + 1, "token_ids": encode_int32([chosen[row]])} for row in (0, 1)],
        block_table_deltas=encode_int32([1, 1, 3]),
        batch=make_batch([0, 1], [1, 1], [width + 1, width + 1]),
    )
    # A beam reports the same candidates as its tokens do when they are computed anew.
    for row, reported in enumerate(result.candidates):
        tokens = [*prompt, best[0], chosen[row]]
        assign = make_assign(4 + row, tokens, [6 + 2 * row, 7 + 2 * row], num_candidates=4)
        alone = await client.run(assign=[assign], batch=make_batch([4 + row], [len(tokens)], [0]))
        assert alone.candidates[0].token_ids == reported.token_ids
    assert [each.row for each in result.candidates] == [0, 1]


async def test_steps_in_flight_are_answered_before_the_refusal(client: StepClient) -> None:
    await prefill(client)
    await client.send(client.step(batch=decode_batch(3)))
    await client.send(client.step(batch=make_batch([6], [1], [0])))
    assert (await client.result()).step_id == 2
    assert isinstance(await client.error(), InvalidArgument)


async def test_heartbeats_come_at_least_once_a_second(client: StepClient) -> None:
    await prefill(client)
    await client.heartbeat()
    # Counted in naps of this process, which a busy machine makes longer as it does the worker's.
    reading, num_naps = asyncio.ensure_future(client.heartbeat()), 0
    while not reading.done():
        await asyncio.sleep(0.1)
        num_naps += 1
    assert num_naps <= 10
    beat = await reading
    assert beat.last_step_id == 1
    assert beat.busy_ms == 0


async def test_sealed_blocks_are_reported_to_the_next_scheduler(address: str) -> None:
    async with attached_client(address, 1) as client:
        blocks = [3, 5]
        await client.run(
            assign=[make_assign(0, [1] * 2 * client.info.pool.block_size, blocks)],
            batch=make_batch([0], [2 * client.info.pool.block_size], [0]),
            sealed_block_ids=encode_int32(blocks),
            sealed_hashes=HASHES,
        )
    async with attached_client(address, 2) as client:
        assert ints(client.attached.sealed_block_ids) == [3, 5]
        assert client.attached.sealed_hashes == HASHES


@pytest.mark.parametrize("row_sampling", [b"", b"\xff\xff", make_row_sampling(constraint=Constraint(regex="("))])
async def test_a_constraint_is_prepared_between_steps_whatever_it_is(client: StepClient, row_sampling: bytes) -> None:
    await prefill(client)
    await client.write(worker_pb2.RunRequest(prepare=worker_pb2.PrepareConstraint(number=7, row_sampling=row_sampling)))
    assert await client.prepared() == 7
    assert (await client.run(batch=decode_batch(3))).step_id == 2


def test_workers_keep_the_constraints_that_schedulers_count_on() -> None:
    """The same number of older constraints may have been used since."""
    assert MIN_KEPT >= 2 * NUM_KEPT
