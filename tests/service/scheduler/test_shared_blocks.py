"""Blocks as the scheduler service keeps them: shared, cached, preempted, shown."""

from typing import Any

from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.request import sequence_seed
from tests.support.fake_runner import token_at
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    running_scheduler,
    state_of,
    wait_attached,
    wait_nothing_in_use,
)


async def test_a_pool_too_small_preempts_and_loses_nothing(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=12, block_size=4)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        for handle in range(1, 9):
            await stream.submit(make_submit(handle, max_tokens=30))
        await stream.read_until_over(*range(1, 9))
        for handle in range(1, 9):
            assert stream.outputs[handle] == expected_tokens(handle, max_tokens=30)
        assert (await state_of(stub)).preemptions > 0
        stream.close()


async def test_get_state_shows_block_tables(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.02, block_size=4)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=50))
        await stream.read()
        (sequence,) = (await state_of(stub, include_sequences=True)).sequences
        assert sequence.request_id == "request-1"
        assert sequence.status == scheduler_pb2.SEQUENCE_STATUS_RUNNING
        assert sum(block.filled for block in sequence.block_table) == sequence.num_computed_tokens
        assert all(block.ref_count == 1 for block in sequence.block_table)
        stream.close()


async def test_a_cached_prefix_is_reported_and_survives_a_restart_of_the_scheduler(worker, tmp_path):
    long: dict[str, Any] = {"prompt_len": 100, "max_tokens": 4}
    async with running_scheduler(str(tmp_path / "a.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, **long))
        await stream.read_until_over(1)
        assert stream.completed[1].usage.cached_tokens == 0
        again = make_submit(1, **long)
        again.handle = 2
        await stream.submit(again)
        await stream.read_until_over(2)
        assert stream.completed[2].usage.cached_tokens == 96
        assert stream.outputs[2] == stream.outputs[1]
        await wait_nothing_in_use(stub)
        assert (await state_of(stub)).gpu_pool.cached_blocks == 6
        stream.close()
    async with running_scheduler(str(tmp_path / "b.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, **long))
        await stream.read_until_over(1)
        assert stream.completed[1].usage.cached_tokens > 0
        assert stream.outputs[1] == expected_tokens(1, **long)
        stream.close()


async def test_samples_of_one_prompt_fork_copy_on_write_and_end_one_by_one(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=24, block_size=4)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        for handle in (1, 2, 3):
            await stream.submit(make_submit(handle, prompt_len=6, max_tokens=20, n=3))
        await stream.read_until_over(1, 2, 3)
        for handle in (1, 2, 3):
            assert stream.outputs[handle] == expected_tokens(handle, prompt_len=6, max_tokens=20)
            for index in (1, 2):
                seed = sequence_seed(handle, index)
                assert stream.samples[handle, index] == [token_at(seed, 6 + i) for i in range(20)]
        assert (await state_of(stub)).preemptions > 0
        await wait_nothing_in_use(stub)
        stream.close()


async def test_one_sequence_of_a_request_can_be_ended(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.003)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=60, n=2))
        await stream.read()
        abort = scheduler_pb2.Abort(handle=1, sequence_index=1)
        await stream.call.write(scheduler_pb2.ConnectRequest(abort=abort))
        await stream.read_until_over(1)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=60)
        assert len(stream.samples[1, 1]) < 60
        await wait_nothing_in_use(stub)
        stream.close()
