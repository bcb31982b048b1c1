"""A gateway that comes back goes on with its requests: their place, their blocks, and all that came meanwhile."""

import asyncio
import re
from typing import Any

import pytest

from quire.common.v1 import common_pb2
from tests.support.cut_link import cut_link
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.gateway_process import collect, running_gateway, stream_request
from tests.support.metrics import read_metric, read_metrics
from tests.support.ports import free_port
from tests.support.processes import until_true
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
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


async def connect(stub, gateway_id: str = "gateway-a", credit: int = 4) -> GatewayStream:
    stream, _ = await GatewayStream.open(stub, gateway_id, grace_period_ms=GRACE_MS, credit=credit)
    return stream


@pytest.mark.parametrize("fault", ["reconnect", "another scheduler"])
async def test_a_request_that_was_accepted_is_not_refused_for_a_full_queue(worker, tmp_path, fault):
    worker.config = FakeWorkerConfig(step_seconds=0.002, max_num_rows=1)
    settings = {"max_waiting_requests": 2}
    async with attached_scheduler(tmp_path, worker.address, **settings) as stub:
        stream = await connect(stub)
        await stream.submit(make_submit(1, max_tokens=100))
        await stream.read()
        # No place in the queue comes free by itself.
        worker.hang.set()
        for handle in (2, 3):
            await stream.submit(make_submit(handle, max_tokens=5))
        await until_state(stub, lambda state: state.waiting_requests == 2)
        if fault == "reconnect":
            stream.close()
            again = await connect(stub)
        else:
            # To this one they are as unknown as to a scheduler that was started again.
            again = await connect(stub, "gateway-b")
        for handle in (1, 2, 3):
            await again.submit(resubmit(stream, handle, max_tokens=100 if handle == 1 else 5))
        await again.submit(make_submit(4))
        await again.read_until_over(4)
        worker.hang.clear()
        await again.read_until_over(1, 2, 3)
        assert list(again.failed) == [4]
        assert again.failed[4].reason == "QUEUE_FULL"
        assert again.outputs[3] == expected_tokens(3, max_tokens=5)
        stream.close()
        again.close()


async def test_a_sequence_that_a_stop_string_ended_ends_though_the_abort_was_lost(scheduler, worker):
    stream = await connect(scheduler)
    await stream.submit(make_submit(1, max_tokens=150, n=2))
    while len(stream.samples.get((1, 1), [])) < 10:
        await stream.read()
    worker.hang.set()
    stream.ended.add((1, 1))
    stream.close()
    again = await connect(scheduler)
    await again.submit(resubmit(stream, 1, max_tokens=150, n=2))
    worker.hang.clear()
    await again.read_until_over(1)
    assert again.outputs[1] == expected_tokens(1, max_tokens=150)
    assert len(again.samples[1, 1]) == len(stream.samples[1, 1])
    assert again.completed[1].usage.generated_tokens < 300
    again.close()


async def outcomes(port: int) -> dict[str, float]:
    """How many requests ended, by outcome."""
    total = re.compile(r'quire_scheduler_requests_total\{outcome="(\w+)"\}')
    metrics = await read_metrics(port)
    return {found[1]: value for name, value in metrics.items() if (found := total.fullmatch(name))}


async def test_what_is_submitted_again_goes_on_and_what_is_left_behind_is_aborted(worker, tmp_path):
    port = free_port()
    async with attached_scheduler(tmp_path, worker.address, metrics_port=port) as scheduler:
        first, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
        # Without a worker nothing ends by itself.
        await worker.stop()
        for handle in (1, 2):
            await first.submit(make_submit(handle))
        await until_state(scheduler, lambda state: state.waiting_requests == 2)
        first.close()
        second, _ = await GatewayStream.open(scheduler, "gateway-a")
        await second.submit(resubmit(first, 1))
        await second.end_unread()
        await until_state(scheduler, lambda state: state.waiting_requests == 1)
        assert (await outcomes(port)) == {"aborted": 1, "completed": 0, "failed": 0}
        second.close()
        await wait_nothing_in_use(scheduler)
        assert (await outcomes(port)) == {"aborted": 2, "completed": 0, "failed": 0}


@pytest.mark.parametrize("moment", ["while it runs", "once it is over"])
async def test_a_durable_request_is_read_from_its_first_token_on_by_whoever_comes(scheduler, moment):
    first = await connect(scheduler, "gateway-a")
    await first.submit(make_submit(7, max_tokens=60, tenant="a", durable=True))
    await (first.read() if moment == "while it runs" else first.read_until_over(7))
    first.close()
    second = await connect(scheduler, "gateway-b")
    for handle in (8, 9):
        await second.resume(handle, "request-7", tenant="a")
        await second.read_until_over(handle)
        assert second.outputs[handle] == expected_tokens(7, max_tokens=60)
        assert second.completed[handle].usage.generated_tokens == 60
    second.close()


async def test_a_real_gateway_whose_link_breaks_again_and_again_costs_no_token_twice(tmp_path):
    port = free_port()
    worker = FakeWorker(LlamaWorkerConfig(step_seconds=0.004))
    address = await worker.start()
    listen = f"127.0.0.1:{free_port()}"
    async with (
        running_scheduler("", address, listen=listen, metrics_port=port) as stub,
        cut_link(listen) as link,
    ):
        await wait_attached(stub)
        async with running_gateway(SchedulerAddress(link.address)) as gateway:
            requests = [stream_request("hello " * (number + 1), max_tokens=150) for number in range(6)]
            for request in requests:
                request.stopping.ignore_eos = True
                request.sampling.temperature = 1.0
                request.sampling.seed = 5
            reading = [asyncio.create_task(collect(gateway.generation.GenerateStream(each))) for each in requests]
            for at in (15, 60, 100):
                await until_true(lambda at=at: worker.num_steps > at)
                link.reset()
            answers = await asyncio.gather(*reading)
            assert all(len(each.token_ids) == 150 for each in answers)
            prompt_tokens = sum(each.completed.usage.prompt_tokens for each in answers)
            assert all(each.completed.usage.prompt_tokens > 0 for each in answers)
            computed = await read_metric(port, "quire_scheduler_batched_tokens_total")
            cached = sum(each.completed.usage.cached_tokens for each in answers)
            assert computed <= prompt_tokens - cached + 6 * 150
        await wait_nothing_in_use(stub)
    await worker.stop()


KINDS: dict[str, dict[str, Any]] = {
    "n": {"sampling": {"temperature": 1.0, "seed": 1, "n": 2}},
    "best_of": {"sampling": {"temperature": 1.0, "seed": 1, "n": 2, "best_of": 4}},
    "beams": {"sampling": {"n": 2, "beam_search": {"beam_width": 2}}},
    "logprobs": {"output": common_pb2.OutputOptions(logprobs=2)},
    "prompt logprobs": {"output": common_pb2.OutputOptions(prompt_logprobs=1)},
}


@pytest.mark.parametrize("kind", KINDS)
async def test_requests_of_every_kind_go_on(worker, tmp_path, kind):
    worker.config = FakeWorkerConfig(step_seconds=0.002)
    fields: dict[str, Any] = KINDS[kind] | {"prompt_len": 40, "max_tokens": 40}
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    async with attached_scheduler(tmp_path, worker.address, **settings) as stub:
        undisturbed = await connect(stub)
        await undisturbed.submit(make_submit(1, **fields))
        await undisturbed.read_until_over(1)
        undisturbed.close()
        await until_state(stub, lambda state: not state.connected_gateways)
        steps, logprobs = worker.num_steps, []
        stream = await connect(stub)
        await stream.submit(make_submit(1, **fields))
        for at in (2, 14, 26):
            await until_true(lambda at=at, steps=steps: worker.num_steps > steps + at)
            stream.close()
            logprobs += stream.logprobs.get(1, [])
            again = await connect(stub)
            await again.submit(resubmit(stream, 1, **fields))
            stream = again
        await stream.read_until_over(1)
        assert stream.outputs[1] == undisturbed.outputs[1]
        assert stream.samples.get((1, 1)) == undisturbed.samples.get((1, 1))
        assert logprobs + stream.logprobs.get(1, []) == undisturbed.logprobs.get(1, [])
        assert stream.num_prompt_logprobs(1) == undisturbed.num_prompt_logprobs(1)
        assert stream.completed[1].usage.generated_tokens == undisturbed.completed[1].usage.generated_tokens
        assert stream.completed[1].usage.preemptions == 0
        stream.close()
