"""What the worker without a model adds to the contract: known tokens and candidates, and a sharp eye on the blocks."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from quire.arrays import encode_int32
from quire.rpc.errors import Internal
from tests.support.fake_pool import BlockError, ForeignBlockError
from tests.support.fake_rows import SharedBlockError
from tests.support.fake_runner import FakeRunner, candidates_at, token_at
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.logprobs import lines_by_row
from tests.support.worker_client import StepClient, attached_client, ints, make_assign, make_batch

CONFIG = FakeWorkerConfig(block_size=4, num_host_blocks=6, failing_seeds=frozenset([13]))
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


async def test_logprobs_name_the_token_first_and_candidates_follow_from_the_tokens(client: StepClient) -> None:
    result = await client.run(
        assign=[make_assign(0, PROMPT, [0, 1], logprobs=3), make_assign(1, PROMPT, [2, 3], num_candidates=2, seed=5)],
        batch=make_batch([0, 1], [5, 5], [0, 0]),
    )
    token_id = token_at(0, 5)
    assert ints(result.token_ids) == [token_id, 0]
    assert lines_by_row(result)[0].top_token_ids == [token_id, token_id + 1, token_id + 2]
    token_ids, logprobs = candidates_at(PROMPT, 2)
    assert ints(result.candidates[0].token_ids) == token_ids.tolist()
    assert result.candidates[0].logprobs == logprobs.tobytes()


@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_candidates_are_different_tokens_of_falling_log_probability(vocab_size: int) -> None:
    for tokens in ([5], PROMPT, [*PROMPT, 999], [6, 6, 6, 6]):
        token_ids, logprobs = candidates_at(tokens, 1000, vocab_size)
        assert sorted(token_ids.tolist()) == list(range(vocab_size))
        assert (np.diff(logprobs) < 0).all()
        assert logprobs[0] < 0
    with pytest.raises(ValueError, match="vocab_size is 74"):
        FakeRunner(8, 4, 74)


def resume(blocks: list[int], tokens: list[int] = PROMPT, **changes: object) -> dict[str, object]:
    """A step that lets row 3 go on after PROMPT in these blocks."""
    return {"assign": [make_assign(3, [*tokens, 6], blocks)], "batch": make_batch([3], [1], [5]), **changes}


def operations(**pairs: list[int]) -> dict[str, bytes]:
    return {name: encode_int32(values) for name, values in pairs.items()}


MISUSES: dict[str, tuple[dict[str, object], str]] = {
    "blocks in the wrong order": (resume([1, 0]), "row 3 reads block 1, which does not hold its token 0"),
    "a block that was never written": (resume([0, 2]), "row 3 reads block 2, which does not hold its token 4"),
    "other tokens before": (resume([0, 1], [1, 2, 3, 5, 5]), "block 0, which does not hold its token 3"),
    "another block copied": (resume([0, 2], cache_operations=operations(copy=[0, 2])), "block 2, .* token 4"),
    "another block swapped in": (
        resume([4, 5], cache_operations=operations(swap_out=[0, 1, 1, 2], swap_in=[1, 4, 3, 5])),
        "block 5, .* token 4",
    ),
    "a block overwritten by what comes in": (
        resume([0, 1], cache_operations=operations(swap_in=[0, 1])),
        "block 1, .* token 4",
    ),
}


@pytest.mark.parametrize(("step", "message"), MISUSES.values(), ids=MISUSES.keys())
async def test_a_row_that_reads_what_is_not_its_own_fails_the_step_and_whoever_stops_the_worker(
    step: dict[str, object], message: str
) -> None:
    worker = FakeWorker(CONFIG)
    async with attached_client(await worker.start(), 1) as client:
        await client.run(assign=[make_assign(0, PROMPT, [0, 1])], batch=make_batch([0], [5], [0]))
        await client.run(release=encode_int32([0]))
        await client.send(client.step(**step))
        assert isinstance(await client.error(), Internal)
    with pytest.raises(ForeignBlockError, match=message) as raised:
        await worker.stop()
    assert isinstance(raised.value, BlockError)


async def test_a_beam_whose_block_was_not_copied_is_found(client: StepClient, worker: FakeWorker) -> None:
    """Two beams that append different tokens to one block: the second write is refused before it does harm."""
    await client.run(
        assign=[make_assign(0, PROMPT, [0, 1], num_candidates=4)],
        fork=encode_int32([0, 1]),
        batch=make_batch([0], [5], [0], [(0, 0), (1, 0)]),
    )
    await client.send(
        client.step(
            set_tokens=[{"row": row, "position": 5, "token_ids": encode_int32([row])} for row in (0, 1)],
            batch=make_batch([1], [1], [5]),
        )
    )
    assert isinstance(await client.error(), Internal)
    assert isinstance(worker.faults.pop(), SharedBlockError)


async def test_rows_with_failing_seeds_fail_alone(client: StepClient) -> None:
    result = await client.run(
        assign=[make_assign(0, PROMPT, [0, 1], seed=13), make_assign(1, PROMPT, [2, 3], seed=1)],
        batch=make_batch([0, 1], [5, 5], [0, 0]),
    )
    assert [failure.row for failure in result.failures] == [0]
    assert ints(result.token_ids)[1] == token_at(1, 5)
    # The step behind the failed one was sent already.
    await client.run(batch=make_batch([0, 1], [1, 1], [5, 5]))


async def test_a_write_over_another_rows_tokens_fails_the_step_and_whoever_stops_the_worker() -> None:
    worker = FakeWorker(CONFIG)
    async with attached_client(await worker.start(), 1) as client:
        await client.run(assign=[make_assign(0, PROMPT, [0, 1])], batch=make_batch([0], [5], [0]))
        others = [token_id + 1 for token_id in PROMPT]
        await client.send(client.step(assign=[make_assign(1, others, [2, 1])], batch=make_batch([1], [5], [0])))
        assert isinstance(await client.error(), Internal)
    with pytest.raises(SharedBlockError, match="row 1 writes to block 1"):
        await worker.stop()
