"""One real scheduler service over loopback gRPC, between a fake worker and a gateway's end of the stream."""

import asyncio

import grpc
import pytest
from google.rpc import code_pb2

from quire.arrays import encode_int32
from quire.common.v1 import common_pb2
from quire.rpc.errors import from_rpc_error
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.request import sequence_seed
from tests.support.fake_runner import token_at
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    running_scheduler,
    state_of,
    until,
    wait_attached,
    wait_nothing_in_use,
)


@pytest.fixture
async def worker():
    fake = FakeWorker()
    fake.address = await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def scheduler(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        yield stub
        await wait_nothing_in_use(stub)


async def test_welcome_tells_what_the_replica_is(scheduler):
    stream, welcome = await GatewayStream.open(scheduler)
    assert (welcome.vocab_size, welcome.max_model_len, welcome.block_size, welcome.num_gpu_blocks) == (
        1000,
        1024,
        16,
        256,
    )
    assert welcome.architecture == "FakeForCausalLM"
    assert welcome.scheduler_epoch > 0
    stream.close()


async def test_a_request_streams_its_tokens_and_one_end(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(7))
    await stream.read_until_over(7)
    assert stream.outputs[7] == expected_tokens(7)
    assert stream.ends[7].reason == common_pb2.FINISH_REASON_LENGTH
    assert stream.ends[7].num_tokens == 8
    usage = stream.completed[7].usage
    assert (usage.prompt_tokens, usage.generated_tokens, usage.preemptions) == (5, 8, 0)
    stream.close()


async def test_many_requests_of_two_gateways_each_get_their_own(scheduler):
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    second, _ = await GatewayStream.open(scheduler, "gateway-b")
    for handle in range(40):
        stream = first if handle % 2 else second
        await stream.submit(make_submit(handle, prompt_len=1 + handle, max_tokens=3 + handle % 5))
    await asyncio.gather(
        first.read_until_over(*range(1, 40, 2)),
        second.read_until_over(*range(0, 40, 2)),
    )
    for handle in range(40):
        outputs = (first if handle % 2 else second).outputs
        assert outputs[handle] == expected_tokens(handle, prompt_len=1 + handle, max_tokens=3 + handle % 5)
    first.close()
    second.close()


async def test_events_of_one_step_come_as_one_message(scheduler, worker):
    stream, _ = await GatewayStream.open(scheduler)
    for handle in range(1, 33):
        await stream.submit(make_submit(handle, max_tokens=20))
    await stream.read_until_over(*range(1, 33))
    assert stream.num_messages <= worker.num_steps
    stream.close()


async def test_a_stop_token_ends_the_sequence(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    stop = token_at(3, 5 + 2)
    await stream.submit(make_submit(3, max_tokens=100, stop=[stop]))
    await stream.read_until_over(3)
    assert stream.outputs[3] == expected_tokens(3, max_tokens=3)
    assert stream.ends[3].reason == common_pb2.FINISH_REASON_STOP
    assert stream.ends[3].stop_token_id == stop
    stream.close()


async def test_logprobs_come_with_each_token_where_asked(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1, max_tokens=4, output=common_pb2.OutputOptions(logprobs=2)))
    await stream.submit(make_submit(2, max_tokens=4))
    await stream.read_until_over(1, 2)
    assert [entry.chosen.token_id for entry in stream.logprobs[1]] == stream.outputs[1]
    assert [[top.rank for top in entry.top] for entry in stream.logprobs[1]] == [[1, 2]] * 4
    assert 2 not in stream.logprobs
    stream.close()


async def test_abort_frees_blocks_and_nothing_follows(scheduler, worker):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1, max_tokens=1000))
    await stream.submit(make_submit(2, max_tokens=300))
    await stream.read()
    await stream.abort(1)
    await stream.read_until_over(2)
    assert 1 not in stream.completed
    assert len(stream.outputs[1]) < 1000
    stream.close()


async def test_a_gateway_that_leaves_has_its_requests_aborted_after_the_grace_period(scheduler):
    stream, _ = await GatewayStream.open(scheduler, grace_period_ms=0)
    await stream.submit(make_submit(1, max_tokens=1000))
    await stream.read()
    stream.close()
    await wait_nothing_in_use(scheduler)


async def test_a_gateway_that_comes_back_resubmits_and_the_old_stream_ends(scheduler):
    first, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await first.submit(make_submit(1, max_tokens=900))
    while len(first.outputs[1]) < 5:
        await first.read()
    emitted = first.outputs[1][:5]
    first.close()
    second, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await second.submit(make_submit(1, max_tokens=40, emitted=emitted))
    await second.read_until_over(1)
    assert second.outputs[1] == expected_tokens(1, max_tokens=40)
    state = await state_of(scheduler)
    assert (state.running_requests, state.waiting_requests) == (0, 0)
    second.close()


@pytest.mark.parametrize(
    ("submit", "code", "words"),
    [
        (make_submit(1, prompt_len=1020, max_tokens=5), code_pb2.INVALID_ARGUMENT, "1025"),
        (make_submit(1, prompt_len=0), code_pb2.INVALID_ARGUMENT, "prompt"),
        (make_submit(1, max_tokens=0), code_pb2.INVALID_ARGUMENT, "max_tokens"),
        (make_submit(1, bad_token_sequences=[common_pb2.TokenIds(ids=[1000])]), code_pb2.INVALID_ARGUMENT, "1000"),
    ],
)
async def test_a_bad_submission_is_refused_alone(scheduler, submit, code, words):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(submit)
    await stream.submit(make_submit(2))
    await stream.read_until_over(1, 2)
    assert stream.failed[1].code == code
    assert words in stream.failed[1].message
    assert stream.outputs[2] == expected_tokens(2)
    stream.close()


async def test_token_ids_beyond_the_vocabulary_are_refused_with_value_and_limit(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    submit = make_submit(1)
    submit.prompt_token_ids = encode_int32([1, 1000])
    await stream.submit(submit)
    await stream.read_until_over(1)
    assert "1000" in stream.failed[1].message
    stream.close()


async def test_a_handle_in_use_is_refused_with_already_exists(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1, max_tokens=900))
    await stream.submit(make_submit(1))
    await stream.read_until_over(1)
    assert stream.failed[1].code == code_pb2.ALREADY_EXISTS
    await stream.abort(1)
    await wait_nothing_in_use(scheduler)
    stream.close()


async def test_a_stream_without_hello_is_refused(scheduler):
    call = scheduler.Connect()
    await call.write(scheduler_pb2.ConnectRequest(abort=scheduler_pb2.Abort(handle=1)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_full_queue_is_resource_exhausted_with_a_time_to_come_back(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.01, max_num_rows=1)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, max_waiting_requests=2) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=20))
        await stream.read()
        for handle in (2, 3, 4):
            await stream.submit(make_submit(handle))
        await stream.read_until_over(1, 2, 3, 4)
        assert list(stream.failed) == [4]
        assert stream.failed[4].code == code_pb2.RESOURCE_EXHAUSTED
        assert stream.failed[4].reason == "QUEUE_FULL"
        assert 50 <= stream.failed[4].retry_after_ms <= 30_000
        stream.close()


async def test_a_poisoned_request_fails_alone(worker, tmp_path):
    worker.config = FakeWorkerConfig(failing_seeds=frozenset([1]))
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1))
        await stream.submit(make_submit(2))
        await stream.read_until_over(1, 2)
        assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INTERNAL, "NON_FINITE_LOGITS")
        assert stream.outputs[2] == expected_tokens(2)
        await wait_nothing_in_use(stub)
        stream.close()


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


async def test_a_lost_worker_is_a_pause_and_nothing_else(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker(FakeWorkerConfig(step_seconds=0.005))
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        for handle in range(1, 6):
            await stream.submit(make_submit(handle, max_tokens=60))
        while len(stream.outputs[1]) < 10:
            await stream.read()
        await worker.stop()
        successor = FakeWorker(FakeWorkerConfig(num_blocks=128))
        await successor.start(address)
        await stream.read_until_over(*range(1, 6))
        for handle in range(1, 6):
            assert stream.outputs[handle] == expected_tokens(handle, max_tokens=60)
        await wait_nothing_in_use(stub)
        assert (await state_of(stub)).gpu_pool.total_blocks == 128
        stream.close()
        await successor.stop()


async def test_requests_that_no_longer_fit_after_the_worker_came_back_smaller_fail_clearly(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker(FakeWorkerConfig(step_seconds=0.005))
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=500))
        await stream.submit(make_submit(2, max_tokens=40))
        await stream.read()
        await worker.stop()
        successor = FakeWorker(FakeWorkerConfig(num_blocks=4))
        await successor.start(address)
        await stream.read_until_over(1, 2)
        assert stream.failed[1].reason == "POOL_SHRANK"
        assert stream.outputs[2] == expected_tokens(2, max_tokens=40)
        stream.close()
        await successor.stop()


async def test_a_worker_that_hangs_is_given_up_after_the_step_timeout(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, step_timeout=0.3) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=20))
        await stream.read()
        worker.hang.set()
        await stream.submit(make_submit(2, max_tokens=900))

        async def detached() -> bool:
            return (await state_of(stub)).scheduler_epoch > epoch

        epoch = (await state_of(stub)).scheduler_epoch
        await until(detached)
        worker.hang.clear()
        await stream.read_until_over(1, 2)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=20)
        assert stream.outputs[2] == expected_tokens(2, max_tokens=900)
        stream.close()


async def test_connect_is_unavailable_until_a_worker_is_attached(tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), f"unix:{tmp_path / 'nobody.sock'}") as stub:
        call = stub.Connect()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).reason == "NO_WORKER"


async def test_drain_waits_for_live_requests_and_refuses_new_ones(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.005)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=40))
        await stream.read()
        drain = stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=5_000))

        async def draining() -> bool:
            return (await state_of(stub)).draining

        await until(draining)
        await stream.submit(make_submit(2))
        await stream.read_until_over(1, 2)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=40)
        assert stream.failed[2].code == code_pb2.UNAVAILABLE
        assert (await drain).remaining_requests == 0
        stream.close()


async def test_a_gateway_that_does_not_read_holds_up_no_step_and_gets_everything_later(scheduler):
    slow, _ = await GatewayStream.open(scheduler, "gateway-slow")
    quick, _ = await GatewayStream.open(scheduler, "gateway-quick")
    for handle in range(1, 65):
        await slow.submit(make_submit(handle, max_tokens=400))
    await quick.submit(make_submit(1, max_tokens=100))
    await quick.read_until_over(1)
    await wait_nothing_in_use(scheduler)
    assert not any(slow.outputs.values())
    await slow.read_until_over(*range(1, 65))
    assert slow.outputs == {handle: expected_tokens(handle, max_tokens=400) for handle in range(1, 65)}
    slow.close()
    quick.close()


async def test_a_cached_prefix_is_reported_and_survives_a_restart_of_the_scheduler(worker, tmp_path):
    long = {"prompt_len": 100, "max_tokens": 4}
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


async def test_figure_8_can_be_drawn_from_inspect_blocks(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=8, block_size=4, step_seconds=0.1)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, prompt_len=7, max_tokens=5, n=2))
        # The first tokens are there; the step that writes them, which copies the shared block, was planned before.
        await stream.read()
        blocks = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-1"))
        tables = [[(b.block_id, b.ref_count) for b in sequence.block_table] for sequence in blocks.sequences]
        assert [table[:2] for table in tables] == [[(0, 2), (2, 1)], [(0, 2), (1, 1)]]
        nobody = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest(request_id="request-2"))
        assert len(nobody.sequences) == 0
        await stream.read_until_over(1)
        blocks = await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest())
        assert blocks.gpu_pool.used_blocks == 0
        assert {b.block_id for b in blocks.cached} >= {0}
        assert all(len(b.block_hash) == 32 for b in blocks.cached)
        stream.close()


async def test_gateways_are_told_when_the_worker_is_lost_and_when_it_is_back(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker()
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub, "gateway-a")
        await worker.stop()
        await stream.read()
        assert stream.readiness == [False]
        late, _ = await GatewayStream.open(stub, "gateway-b")
        await late.read()
        assert late.readiness == [False]
        successor = FakeWorker()
        await successor.start(address)
        await stream.read()
        await late.read()
        assert stream.readiness == late.readiness == [False, True]
        stream.close()
        late.close()
        await successor.stop()
