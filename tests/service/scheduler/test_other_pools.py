"""A worker that comes back with another pool, or as another model: gateways learn of it, and requests move over."""

import asyncio

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, model_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.gateway_process import RunningGateway, collect, running_gateway, stream_request
from tests.support.metrics import read_metrics
from tests.support.ports import free_port
from tests.support.processes import until_true
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    resubmit,
    running_scheduler,
    until_state,
    wait_attached,
    wait_nothing_in_use,
)
from tests.support.two_gateways import LlamaWorkerConfig, SchedulerAddress

GRACE_MS = 60_000


async def replace_worker(worker: FakeWorker, address: str, config: FakeWorkerConfig) -> FakeWorker:
    """The worker leaves, and another one is started in its place."""
    await worker.stop()
    successor = FakeWorker(config)
    await successor.start(address)
    return successor


async def test_running_requests_go_on_in_another_pool_once_their_gateway_has_connected_again(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker(FakeWorkerConfig(step_seconds=0.005))
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        first, welcome = await GatewayStream.open(stub, grace_period_ms=GRACE_MS)
        assert (welcome.num_gpu_blocks, welcome.block_size) == (256, 16)
        for handle in (1, 2, 3):
            await first.submit(make_submit(handle, max_tokens=60, durable=handle == 3))
        while len(first.outputs[3]) < 10:
            await first.read()
        successor = await replace_worker(worker, address, FakeWorkerConfig(num_blocks=40, block_size=8))
        await first.read_to_end()
        second, welcome = await GatewayStream.open(stub, grace_period_ms=GRACE_MS)
        assert (welcome.num_gpu_blocks, welcome.block_size, welcome.max_model_len) == (40, 8, 320)
        for handle in (1, 2):
            await second.submit(resubmit(first, handle, max_tokens=60))
        await second.submit(resubmit(first, 3, max_tokens=60, durable=True))
        await second.read_until_over(1, 2, 3)
        for handle in (1, 2, 3):
            assert second.outputs[handle] == expected_tokens(handle, max_tokens=60)
        await wait_nothing_in_use(stub)
        second.close()
        await successor.stop()


async def test_requests_that_no_longer_fit_after_the_worker_came_back_smaller_fail_clearly(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker(FakeWorkerConfig(step_seconds=0.005))
    await worker.start(address)
    port = free_port()
    async with running_scheduler(str(tmp_path / "s.sock"), address, metrics_port=port) as stub:
        await wait_attached(stub)
        first, _ = await GatewayStream.open(stub, grace_period_ms=GRACE_MS)
        await first.submit(make_submit(1, max_tokens=500))
        await first.submit(make_submit(2, max_tokens=40))
        await first.read()
        successor = await replace_worker(worker, address, FakeWorkerConfig(num_blocks=4))
        await first.read_to_end()
        assert first.failed[1].reason == "POOL_SHRANK"
        second, _ = await GatewayStream.open(stub, grace_period_ms=GRACE_MS)
        await second.submit(resubmit(first, 2, max_tokens=40))
        await second.read_until_over(2)
        assert second.outputs[2] == expected_tokens(2, max_tokens=40)
        metrics = await read_metrics(port)
        assert metrics['quire_scheduler_requests_total{outcome="failed"}'] == 1
        second.close()
        await successor.stop()


async def test_a_gateway_that_connected_while_there_was_no_worker_connects_again(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker()
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        await worker.stop()
        await until_state(stub, lambda state: not state.workers[0].attached)
        stream, welcome = await GatewayStream.open(stub)
        assert welcome.vocab_size == 1000
        successor = FakeWorker(FakeWorkerConfig(vocab_size=500))
        await successor.start(address)
        await stream.read_to_end()
        assert stream.readiness[-1]
        again, welcome = await GatewayStream.open(stub)
        assert welcome.vocab_size == 500
        again.close()
        await successor.stop()


async def test_a_scheduler_that_drains_keeps_its_streams_whatever_pool_the_worker_comes_back_with(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker(FakeWorkerConfig(step_seconds=0.005))
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=60))
        await stream.read()
        drain = stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000))
        while not stream.readiness:
            await stream.read()
        successor = await replace_worker(worker, address, FakeWorkerConfig(num_blocks=40))
        # No gateway can connect again.
        await stream.read_until_over(1)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=60)
        assert (await drain).remaining_requests == 0
        stream.close()
        await successor.stop()


async def longest_answer(gateway: RunningGateway) -> int:
    """How many tokens a request of three tokens gets that leaves it to the gateway how many."""
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(ids=[5, 6, 7]))
    request.stopping.ignore_eos = True
    answer = await gateway.generation.Generate(request, timeout=60)
    return len(answer.sequences[0].token_ids)


async def replica_known_to(gateway: RunningGateway) -> model_pb2.Replica:
    info = await gateway.models.GetServerInfo(model_pb2.GetServerInfoRequest())
    return info.replicas[0]


async def test_a_gateway_knows_the_limits_of_whatever_pool_the_worker_comes_back_with(tmp_path):
    address, socket = f"unix:{tmp_path / 'w.sock'}", tmp_path / "s.sock"
    worker = FakeWorker(LlamaWorkerConfig(num_blocks=8, block_size=8, step_seconds=0.002))
    await worker.start(address)
    async with running_scheduler(str(socket), address) as stub:
        await wait_attached(stub)
        async with running_gateway(SchedulerAddress(f"unix:{socket}")) as gateway:
            assert await longest_answer(gateway) == 8 * 8 - 3
            for num_blocks in (6, 10):
                reading = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request(max_tokens=30))))
                steps_before = worker.num_steps
                await until_true(lambda: worker.num_steps > steps_before + 5)  # noqa: B023
                worker = await replace_worker(
                    worker, address, LlamaWorkerConfig(num_blocks, block_size=8, step_seconds=0.002)
                )
                assert len((await reading).token_ids) == 30
                replica = await replica_known_to(gateway)
                assert (replica.num_gpu_blocks, replica.device_name) == (num_blocks, "a fake")
                assert await longest_answer(gateway) == num_blocks * 8 - 3
    await worker.stop()
