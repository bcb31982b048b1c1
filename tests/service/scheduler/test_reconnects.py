"""A gateway that comes back goes on with its requests: their place, their blocks, and all that came meanwhile."""

import asyncio

import pytest
from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.cut_link import cut_link
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.gateway_process import collect, running_gateway, stream_request
from tests.support.metrics import read_metric
from tests.support.ports import free_port
from tests.support.processes import until_true
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    resubmit,
    running_scheduler,
    state_of,
    until,
    wait_attached,
    wait_nothing_in_use,
)
from tests.support.two_gateways import LlamaWorkerConfig, SchedulerAddress

GRACE_MS = 60_000


async def connect(stub, gateway_id: str = "gateway-a", credit: int = 4) -> GatewayStream:
    stream, _ = await GatewayStream.open(stub, gateway_id, grace_period_ms=GRACE_MS, credit=credit)
    return stream


async def wait_left(stub) -> None:
    """Until the scheduler has seen that no stream is open."""

    async def has_left() -> bool:
        return (await state_of(stub)).connected_gateways == 0

    await until(has_left)


async def wait_over(stub) -> None:
    async def is_over() -> bool:
        state = await state_of(stub)
        return not (state.running_requests or state.waiting_requests or state.swapped_requests)

    await until(is_over)


async def test_nothing_is_computed_again(worker, tmp_path):
    port = free_port()
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, metrics_port=port) as stub:
        await wait_attached(stub)
        stream = await connect(stub)
        handles = range(1, 9)
        for handle in handles:
            await stream.submit(make_submit(handle, prompt_len=40, max_tokens=100))
        for num_tokens in (10, 30, 50):
            while len(stream.outputs[8]) < num_tokens:
                await stream.read()
            stream.close()
            again = await connect(stub)
            for handle in handles:
                await again.submit(resubmit(stream, handle, prompt_len=40, max_tokens=100))
            await again.end_unread()
            stream = again
        await stream.read_until_over(*handles)
        for handle in handles:
            assert stream.outputs[handle] == expected_tokens(handle, prompt_len=40, max_tokens=100)
            assert stream.completed[handle].usage.cached_tokens == 0
        await wait_nothing_in_use(stub)
        # The last token of a sequence is not computed; two steps may have been on their way for one that had ended.
        computed = await read_metric(port, "quire_scheduler_batched_tokens_total")
        assert 8 * (40 + 99) <= computed <= 8 * (40 + 100)
        stream.close()


async def test_what_is_generated_while_the_gateway_is_away_is_kept_with_its_end_and_its_cost(scheduler, worker):
    stream = await connect(scheduler)
    await stream.submit(make_submit(1, max_tokens=50))
    await stream.read()
    stream.close()
    await wait_over(scheduler)
    steps = worker.num_steps
    again = await connect(scheduler)
    await again.submit(resubmit(stream, 1, max_tokens=50))
    await again.read_until_over(1)
    assert again.outputs[1] == expected_tokens(1, max_tokens=50)
    assert again.ends[1].num_tokens == 50
    assert again.completed[1].usage.generated_tokens == 50
    assert worker.num_steps == steps
    again.close()


async def test_a_gateway_that_is_back_gets_only_what_it_does_not_have(scheduler, worker):
    stream = await connect(scheduler)
    await stream.submit(make_submit(1, max_tokens=150))
    while len(stream.outputs[1]) < 40:
        await stream.read()
    worker.hang.set()
    stream.close()
    again = await connect(scheduler)
    # Its offsets are checked: a token that it has is not sent again, and none that it has not is left out.
    await again.submit(resubmit(stream, 1, max_tokens=150))
    worker.hang.clear()
    await again.read_until_over(1)
    assert again.outputs[1] == expected_tokens(1, max_tokens=150)
    again.close()


@pytest.mark.parametrize("fault", ["reconnect", "another scheduler"])
async def test_a_request_that_was_accepted_is_not_refused_for_a_full_queue(worker, tmp_path, fault):
    worker.config = FakeWorkerConfig(step_seconds=0.002, max_num_rows=1)
    settings = {"max_waiting_requests": 2}
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, **settings) as stub:
        await wait_attached(stub)
        stream = await connect(stub)
        await stream.submit(make_submit(1, max_tokens=100))
        await stream.read()
        # No place in the queue comes free by itself.
        worker.hang.set()
        for handle in (2, 3):
            await stream.submit(make_submit(handle, max_tokens=5))

        async def wait() -> bool:
            return (await state_of(stub)).waiting_requests == 2

        await until(wait)
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


async def test_a_request_keeps_its_place_in_the_queue(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.002, max_num_rows=1)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        mine, other = await connect(stub, "gateway-a"), await connect(stub, "gateway-b")
        await other.submit(make_submit(1, max_tokens=60))
        await other.read()
        # The others wait until all is said.
        worker.hang.set()

        async def num_waiting(count: int) -> None:
            async def wait() -> bool:
                return (await state_of(stub)).waiting_requests == count

            await until(wait)

        await mine.submit(make_submit(2, max_tokens=3))
        await num_waiting(1)
        await other.submit(make_submit(3, max_tokens=60))
        await num_waiting(2)
        mine.close()
        again = await connect(stub, "gateway-a")
        await again.submit(resubmit(mine, 2, max_tokens=3))
        await again.end_unread()
        worker.hang.clear()
        await again.read_until_over(2)
        # Its turn came before that of the request which had come after it.
        assert 3 not in other.completed
        state = await state_of(stub)
        assert state.waiting_requests + state.running_requests >= 1
        await other.read_until_over(1, 3)
        again.close()
        other.close()


@pytest.mark.parametrize("kind", ["n", "best_of", "beams", "logprobs", "prompt logprobs"])
async def test_requests_of_every_kind_go_on(worker, tmp_path, kind):
    worker.config = FakeWorkerConfig(step_seconds=0.002)
    fields: dict = {"prompt_len": 40, "max_tokens": 40}
    sampling = {"n": 2} if kind in ("n", "best_of", "beams") else {}
    if kind == "logprobs":
        fields["output"] = common_pb2.OutputOptions(logprobs=2)
    if kind == "prompt logprobs":
        fields["output"] = common_pb2.OutputOptions(prompt_logprobs=1)

    def shaped(submit: scheduler_pb2.Submit) -> scheduler_pb2.Submit:
        if kind == "best_of":
            submit.sampling.best_of = 4
        if kind == "beams":
            submit.sampling.beam_search.beam_width = 2
            submit.sampling.beam_search.length_penalty = 1.0
            submit.sampling.beam_search.early_stopping = common_pb2.EARLY_STOPPING_FALSE
        return submit

    async with running_scheduler(
        str(tmp_path / "s.sock"), worker.address, max_num_batched_tokens=16, max_num_seqs=8
    ) as stub:
        await wait_attached(stub)
        undisturbed = await connect(stub)
        await undisturbed.submit(shaped(make_submit(1, **sampling, **fields)))
        await undisturbed.read_until_over(1)
        undisturbed.close()
        await wait_left(stub)
        steps = worker.num_steps
        stream = await connect(stub)
        await stream.submit(shaped(make_submit(1, **sampling, **fields)))
        logprobs = []
        for at in (2, 14, 26):
            await until_true(lambda at=at, steps=steps: worker.num_steps > steps + at)
            stream.close()
            logprobs += stream.logprobs.get(1, [])
            again = await connect(stub)
            await again.submit(shaped(resubmit(stream, 1, **sampling, **fields)))
            stream = again
        await stream.read_until_over(1)
        logprobs += stream.logprobs.get(1, [])
        assert stream.outputs[1] == undisturbed.outputs[1]
        assert stream.samples.get((1, 1)) == undisturbed.samples.get((1, 1))
        assert logprobs == undisturbed.logprobs.get(1, [])
        assert stream.num_prompt_logprobs(1) == undisturbed.num_prompt_logprobs(1)
        assert stream.completed[1].usage.generated_tokens == undisturbed.completed[1].usage.generated_tokens
        assert stream.completed[1].usage.preemptions == 0
        stream.close()


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


async def test_what_its_gateway_does_not_want_any_more_ends_once_that_is_back(scheduler, worker):
    stream = await connect(scheduler)
    for handle in (1, 2):
        await stream.submit(make_submit(handle, max_tokens=900))
    await stream.read()
    worker.hang.set()
    stream.close()
    again = await connect(scheduler)
    await again.submit(resubmit(stream, 1, max_tokens=900))
    await again.end_unread()

    async def one_runs() -> bool:
        return (await state_of(scheduler)).running_requests == 1

    await until(one_runs)
    await again.abort(1)
    await wait_nothing_in_use(scheduler)
    again.close()


async def test_a_gateway_without_credit_hears_that_the_replica_drains(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.002)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.give_credit()
        await stream.submit(make_submit(1, max_tokens=900))
        await stream.read()
        # It takes no more events, which wait.
        steps = worker.num_steps
        await until_true(lambda: worker.num_steps > steps + 3)
        drain = stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000), timeout=65)
        async with asyncio.timeout(30):
            while not stream.readiness:
                await stream.read()
        assert stream.readiness == [False]
        assert stream.num_events == 1
        await stream.abort(1)
        assert (await drain).remaining_requests == 0
        stream.close()


async def test_credit_for_what_was_never_sent_ends_the_stream(scheduler):
    stream = await connect(scheduler)
    credit = scheduler_pb2.Credit(messages=1, taken=7)
    await stream.call.write(scheduler_pb2.ConnectRequest(credit=credit))
    with pytest.raises(Exception, match=r"credit\.taken is 7"):
        await stream.read()
    assert (await stream.call.code()).value[0] == code_pb2.INVALID_ARGUMENT


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
