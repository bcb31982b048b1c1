"""Log probabilities of prompts reach the gateway before the first token, whatever is computed again."""

import pytest

from quire.common.v1 import common_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import GatewayStream, make_submit, running_scheduler, state_of, wait_attached

ASKED = common_pb2.OutputOptions(prompt_logprobs=1)


@pytest.fixture
async def scheduler(worker: FakeWorker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=10, max_num_batched_tokens=16, max_num_rows=8)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, watermark=0.0) as stub:
        await wait_attached(stub)
        yield stub


async def run(stub, *submits) -> GatewayStream:
    """Its end checks that no position is lost or comes twice."""
    stream, _ = await GatewayStream.open(stub)
    for submit in submits:
        await stream.submit(submit)
    await stream.read_until_over(*(submit.handle for submit in submits))
    assert not stream.failed
    stream.close()
    return stream


def expected_positions(handle: int, prompt_len: int) -> list[tuple[int, float, int, int]]:
    return [((handle + position) % 100, -position, position, 1) for position in range(1, prompt_len)]


async def test_each_position_is_reported_once_over_chunks_and_only_where_asked(scheduler):
    stream = await run(
        scheduler,
        make_submit(1, prompt_len=50, max_tokens=5, output=ASKED),
        make_submit(2, prompt_len=20, max_tokens=5),
        make_submit(3, prompt_len=1, max_tokens=5, output=ASKED),
    )
    assert stream.prompt_logprobs == {1: expected_positions(1, 50), 2: [], 3: []}


async def test_the_same_prompt_again_is_not_taken_from_the_cache(scheduler):
    await run(scheduler, make_submit(1, prompt_len=50, max_tokens=5))
    stream = await run(scheduler, make_submit(1, prompt_len=50, max_tokens=5, output=ASKED))
    assert stream.prompt_logprobs[1] == expected_positions(1, 50)


async def test_preemption_neither_loses_nor_repeats_what_was_delivered(scheduler):
    handles = range(1, 6)
    stream = await run(
        scheduler, *(make_submit(handle, prompt_len=30, max_tokens=60, output=ASKED) for handle in handles)
    )
    assert (await state_of(scheduler)).preemptions > 0
    assert stream.prompt_logprobs == {handle: expected_positions(handle, 30) for handle in handles}
