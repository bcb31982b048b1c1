"""One real scheduler service over loopback gRPC, between a fake worker and a gateway's end of the stream."""

import asyncio
import math
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from quire.arrays import encode_int32
from quire.common.v1 import common_pb2
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_runner import token_at
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.sampling import make_row_sampling
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


async def test_a_constraint_that_is_compiled_for_long_holds_up_no_other_request(scheduler, worker):
    compiled = Future[None]()
    worker.prepare = lambda row_sampling: compiled
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1, has_constraint=True))
    await stream.submit(make_submit(2, max_tokens=100))
    await stream.read_until_over(2)
    assert not stream.outputs.get(1)
    compiled.set_result(None)
    await stream.read_until_over(1)
    assert stream.outputs[1] == expected_tokens(1)
    assert stream.outputs[2] == expected_tokens(2, max_tokens=100)
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
    # The stand-in for the worker reports the token itself, then those that follow it in the vocabulary.
    assert [line.top_token_ids for line in stream.logprobs[1]] == [[token, token + 1] for token in stream.outputs[1]]
    assert 2 not in stream.logprobs
    stream.close()


async def test_abort_frees_blocks_and_nothing_follows(scheduler, worker):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1, max_tokens=1000))
    await stream.submit(make_submit(2, max_tokens=100))
    await stream.read()
    worker.hang.set()
    await stream.abort(1)

    async def second_is_left() -> bool:
        state = await state_of(scheduler, include_sequences=True)
        held = [sequence for sequence in state.sequences if sequence.request_id != "request-2"]
        return not held and state.gpu_pool.used_blocks == sum(len(each.block_table) for each in state.sequences)

    await until(second_is_left)
    worker.hang.clear()
    await stream.read_until_over(2)
    assert stream.outputs[2] == expected_tokens(2, max_tokens=100)
    assert 1 not in stream.completed
    assert len(stream.outputs[1]) < 100
    stream.close()


@pytest.mark.parametrize(
    ("submit", "code", "words"),
    [
        (make_submit(1, prompt_len=1020, max_tokens=5), code_pb2.INVALID_ARGUMENT, "1025"),
        (make_submit(1, prompt_len=0), code_pb2.INVALID_ARGUMENT, "prompt"),
        (make_submit(1, max_tokens=0), code_pb2.INVALID_ARGUMENT, "max_tokens"),
        # A list of that many would take 32 GB.
        (make_submit(1, n=2**32 - 1, emitted=[1]), code_pb2.INVALID_ARGUMENT, "4294967295 sequences; at most 256 run"),
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


async def test_the_greatest_handle_serves_and_one_more_is_refused_alone(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(2**31))
    await stream.call.write(scheduler_pb2.ConnectRequest(resume=scheduler_pb2.Resume(handle=2**32 - 1, request_id="x")))
    await stream.submit(make_submit(2**31 - 1))
    await stream.read_until_over(2**31, 2**31 - 1, 2**32 - 1)
    for handle in (2**31, 2**32 - 1):
        assert stream.failed[handle].code == code_pb2.INVALID_ARGUMENT
        assert stream.failed[handle].message == f"handle is {handle}; it must be at most 2147483647"
    assert stream.outputs[2**31 - 1] == expected_tokens(2**31 - 1)
    stream.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling.temperature", -1.0),
        ("sampling.temperature", math.nan),
        ("sampling.top_p", 0.0),
        ("sampling.top_p", 1.5),
        ("sampling.min_p", -0.5),
        ("sampling.presence_penalty", math.inf),
        ("sampling.frequency_penalty", -math.inf),
        ("sampling.repetition_penalty", -1.0),
        ("output.logprobs", 21),
        ("output.prompt_logprobs", 21),
    ],
)
async def test_sampling_that_no_gateway_sends_is_refused_by_the_worker_and_fails_alone(scheduler, name, value):
    stream, _ = await GatewayStream.open(scheduler)
    group, field = name.split(".")
    sent: dict[str, Any] = {"output": {field: value}}
    if group == "sampling":
        sent = {"row_sampling": make_row_sampling(**{field: value})}
    await stream.submit(make_submit(1, **sent))
    await stream.submit(make_submit(2))
    await stream.read_until_over(1, 2)
    assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INVALID_ARGUMENT, "INVALID_SAMPLING")
    assert stream.failed[1].message.startswith(f"{name} is {value:g}; ")
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


async def test_a_handle_in_use_is_refused_with_already_exists(scheduler, worker):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1, max_tokens=900))
    await stream.submit(make_submit(1))
    await stream.read_until_over(1)
    assert stream.failed[1].code == code_pb2.ALREADY_EXISTS
    worker.hang.set()
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
        # No place in the queue comes free by itself.
        worker.hang.set()
        for handle in (2, 3, 4):
            await stream.submit(make_submit(handle))
        await stream.read_until_over(4)
        worker.hang.clear()
        await stream.read_until_over(1, 2, 3)
        assert list(stream.failed) == [4]
        assert stream.failed[4].code == code_pb2.RESOURCE_EXHAUSTED
        assert stream.failed[4].reason == "QUEUE_FULL"
        assert 50 <= stream.failed[4].retry_after_ms <= 30_000
        stream.close()
