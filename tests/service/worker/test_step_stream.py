"""The step stream of the real worker, with faults of its device, its rows and its pool."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from quire.messages.arrays import encode_int32
from quire.rpc.errors import Internal, Unavailable, from_rpc_error
from quire.worker.v1 import worker_pb2
from tests.support.tiny_causal_lm import TinyCausalLM
from tests.support.worker_client import (
    StepClient,
    attach_request,
    attached_client,
    ints,
    make_assign,
    make_batch,
    worker_stub,
)
from tests.support.worker_server import SMALL_WORKER, running_worker
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import WorkerServicer, start_server
from worker_svc.startup import make_worker

PROMPT = [3, 1, 4, 1, 5]
BLOCKS = [2, 9]


@dataclass(frozen=True, slots=True)
class Service:
    address: str
    model: TinyCausalLM
    metrics: WorkerMetrics


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    model, metrics = TinyCausalLM(), WorkerMetrics()
    async with running_worker(tmp_path, model, heartbeat_interval_s=0.02, metrics=metrics) as address:
        yield Service(address, model, metrics)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[StepClient]:
    async with attached_client(service.address, 1) as client:
        yield client


async def prefill(
    client: StepClient, row: int = 0, blocks: list[int] = BLOCKS, **sampling: object
) -> worker_pb2.StepResult:
    return await client.run(
        assign=[make_assign(row, PROMPT, blocks, **sampling)], batch=make_batch([row], [len(PROMPT)], [0])
    )


def fail(_: object) -> None:
    raise RuntimeError("the device is on fire")


async def test_a_failed_step_ends_the_session_and_the_worker_can_be_attached_again(service: Service) -> None:
    async with attached_client(service.address, 1) as client:
        expected = ints((await prefill(client)).token_ids)
        service.model.before_step = fail
        await client.send(client.step(batch=make_batch([0], [1], [5])))
        error = await client.error()
        assert isinstance(error, Internal)
        assert "step 2" in error.message
        assert "on fire" in error.message
    # Tokens count as computed when their step has finished.
    counted = service.metrics.registry.get_sample_value
    assert (counted("quire_worker_tokens_total"), counted("quire_worker_steps_total")) == (len(PROMPT), 1)
    service.model.before_step = lambda _: None
    async with attached_client(service.address, 2) as client:
        assert ints((await prefill(client)).token_ids) == expected


async def test_a_block_that_is_written_again_loses_its_seal_unless_the_step_seals_it(service: Service) -> None:
    """Written by a batch, a copy or a swap; blocks that are swapped out keep their seals."""
    async with attached_client(service.address, 1) as client:
        await client.run(sealed_block_ids=encode_int32([2, 9, 11, 12, 13, 14]), sealed_hashes=b"h" * 192)
        await client.run(
            assign=[make_assign(0, PROMPT, BLOCKS)],
            batch=make_batch([0], [len(PROMPT)], [0]),
            cache_operations={
                "swap_out": encode_int32([12, 0]),
                "swap_in": encode_int32([0, 13]),
                "copy": encode_int32([5, 11]),
            },
            sealed_block_ids=encode_int32([2]),
            sealed_hashes=b"k" * 32,
        )
    async with attached_client(service.address, 2) as client:
        assert ints(client.attached.sealed_block_ids) == [2, 12, 14]
        assert client.attached.sealed_hashes == b"k" * 32 + b"h" * 64


async def test_a_worker_that_loads_its_model_says_so(tmp_path: Path) -> None:
    servicer = WorkerServicer(WorkerMetrics())
    server = await start_server(servicer, f"unix:{tmp_path / 'loading'}")
    try:
        async with worker_stub(server.address) as stub:
            with pytest.raises(grpc.RpcError, match="loading its model") as raised:
                await stub.Run([attach_request(1)]).read()
            error = from_rpc_error(raised.value)
            assert isinstance(error, Unavailable)
            assert error.retry_after_ms is not None
    finally:
        await server.stop(grace_s=0)


async def test_a_worker_that_has_discarded_its_weights_attaches_no_scheduler(service: Service) -> None:
    async with worker_stub(service.address) as stub:
        discarding = worker_pb2.ReleaseMemoryRequest(scheduler_epoch=1, discard_weights=True)
        await stub.ReleaseMemory(discarding)
        with pytest.raises(grpc.RpcError, match="asleep without weights"):
            await stub.Run([attach_request(2)]).read()
        await stub.ReleaseMemory(discarding)


async def test_a_scheduler_that_comes_before_the_worker_is_ready_has_it_at_once(tmp_path: Path) -> None:
    servicer = WorkerServicer(WorkerMetrics())
    server = await start_server(servicer, f"unix:{tmp_path / 'loading'}")
    device_loop = DeviceLoop()
    device_loop.start()
    try:
        async with worker_stub(server.address) as stub:
            call = stub.Run()
            await call.write(attach_request(1))
            await servicer.wanted.wait()
            servicer.open(make_worker(TinyCausalLM(), SMALL_WORKER, device_loop))
            assert (await call.read()).HasField("attached")
            call.cancel()
    finally:
        await server.stop(grace_s=0)
        device_loop.stop(60)
