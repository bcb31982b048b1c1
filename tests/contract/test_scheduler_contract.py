"""Behaviour of every scheduler, also the fake one, that gateways rely on: raw messages against all SCHEDULERS.

A scheduler enters as an async context manager that takes a directory for sockets and yields a stub. Its model is MODEL,
a step takes about STEP_S, a sequence may have 1,000 tokens, and one sequence a request is enough.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.messages.arrays import encode_int32
from quire.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, QuireError, Unavailable, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.service.compatibility import SCHEDULER_PROTOCOL, ModelFingerprint, ProtocolVersions
from scheduler_svc.service import watchers
from tests.support.fake_scheduler import running_fake_scheduler
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.grpc_types import EOF
from tests.support.scheduler_process import GatewayStream, make_submit, running_scheduler, wait_attached

MODEL = ModelFingerprint(config="c1", tokenizer="t1")
STEP_S = 0.002
MANY = 900


@asynccontextmanager
async def running_real_scheduler(directory: Path) -> AsyncIterator[SchedulerServiceStub]:
    worker = FakeWorker(FakeWorkerConfig(fingerprint=MODEL, step_seconds=STEP_S))
    async with running_scheduler(str(directory / "s"), await worker.start(f"unix:{directory / 'w'}")) as stub:
        await wait_attached(stub)
        yield stub
    await worker.stop()


@asynccontextmanager
async def running_fake(directory: Path) -> AsyncIterator[SchedulerServiceStub]:
    async with running_fake_scheduler(directory, model=MODEL, step_delay_s=STEP_S) as stub:
        yield stub


SCHEDULERS: dict[str, Callable[[Path], AbstractAsyncContextManager[SchedulerServiceStub]]] = {
    "scheduler_svc": running_real_scheduler,
    "fake_scheduler": running_fake,
}


@pytest.fixture(params=SCHEDULERS)
async def stub(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SchedulerServiceStub]:
    # Frames for watchers come at the same rate on a slow machine.
    monkeypatch.setattr(watchers, "_MAX_SHARE", 1.0)
    # And sooner if nothing happens.
    monkeypatch.setattr(watchers, "_MAX_SILENCE_S", 0.2)
    async with SCHEDULERS[request.param](tmp_path) as stub:
        yield stub


@pytest.fixture
async def stream(stub: SchedulerServiceStub) -> AsyncIterator[GatewayStream]:
    stream, _ = await GatewayStream.open(stub)
    yield stream
    stream.close()


async def end_of(call: grpc.aio.StreamStreamCall) -> QuireError:
    """The error with which the scheduler ends a stream."""
    try:
        async with asyncio.timeout(30):
            while await call.read() is not EOF:
                pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the stream ended without an error")


async def refusal_of(stub: SchedulerServiceStub, first: scheduler_pb2.ConnectRequest) -> QuireError:
    """The scheduler's refusal of a stream that begins with this message."""
    return await end_of(stub.Connect([first]))


async def output_of(stub: SchedulerServiceStub, **submit) -> list[int]:
    """All tokens of request 1, undisturbed."""
    stream, _ = await GatewayStream.open(stub, "undisturbed")
    await stream.submit(make_submit(1, **submit))
    await stream.read_until_over(1)
    stream.close()
    return stream.outputs[1]


# Hello


async def test_welcome_says_what_the_replica_is(stub: SchedulerServiceStub) -> None:
    stream, welcome = await GatewayStream.open(stub)
    assert ProtocolVersions.of(welcome.protocol) == SCHEDULER_PROTOCOL
    assert ModelFingerprint.of(welcome.model) == MODEL
    assert min(welcome.vocab_size, welcome.block_size, welcome.num_gpu_blocks, welcome.max_num_seqs) > 0
    assert welcome.max_model_len > MANY
    assert welcome.scheduler_epoch > 0
    assert welcome.architecture
    stream.close()


NESTED = scheduler_pb2.ConnectRequest(batch={"messages": [b""]})
FITS = {"gateway_id": "g", "protocol": SCHEDULER_PROTOCOL.message()}
OTHER_MODEL = ModelFingerprint(config="c1", tokenizer="t2").message()


@pytest.mark.parametrize(
    ("first", "kind", "reason"),
    [
        ({"submit": make_submit(1)}, FailedPrecondition, "FAILED_PRECONDITION"),
        ({"hello": FITS | {"gateway_id": ""}}, InvalidArgument, "INVALID_ARGUMENT"),
        ({"hello": {"gateway_id": "g"}}, FailedPrecondition, "PROTOCOL_VERSION"),
        ({"hello": FITS | {"protocol": ProtocolVersions(8, 9).message()}}, FailedPrecondition, "PROTOCOL_VERSION"),
        ({"hello": FITS | {"model": OTHER_MODEL}}, FailedPrecondition, "MODEL_MISMATCH"),
    ],
)
async def test_a_stream_that_does_not_begin_with_a_hello_that_fits_is_refused(
    stub: SchedulerServiceStub, first: dict, kind: type[QuireError], reason: str
) -> None:
    error = await refusal_of(stub, scheduler_pb2.ConnectRequest(**first))
    assert isinstance(error, kind)
    assert error.reason == reason


# Events


async def test_requests_get_their_tokens_in_order_then_their_ends_then_what_they_cost(stream: GatewayStream) -> None:
    for handle in (1, 2, 3):
        await stream.submit(make_submit(handle, prompt_len=handle, max_tokens=4 * handle))
    await stream.read_until_over(1, 2, 3)
    for handle in (1, 2, 3):
        assert len(stream.outputs[handle]) == 4 * handle
        end, usage = stream.ends[handle], stream.completed[handle].usage
        assert (end.num_tokens, end.reason) == (4 * handle, common_pb2.FINISH_REASON_LENGTH)
        assert (usage.prompt_tokens, usage.generated_tokens) == (handle, 4 * handle)
    assert not stream.failed


async def test_messages_in_a_batch_are_handled_in_their_order(stub: SchedulerServiceStub) -> None:
    stream, welcome = await GatewayStream.open(stub)
    assert welcome.takes_batches
    requests = [scheduler_pb2.ConnectRequest(submit=make_submit(handle, max_tokens=900)) for handle in (1, 2)]
    abort = scheduler_pb2.ConnectRequest(abort=scheduler_pb2.Abort(handle=1))
    requests += [abort, scheduler_pb2.ConnectRequest(submit=make_submit(1, max_tokens=4))]
    stream.outputs |= {1: [], 2: []}
    await stream.say(batch={"messages": [each.SerializeToString() for each in requests]})
    await stream.read_until_over(1)
    assert len(stream.outputs[1]) == 4
    stream.close()


async def test_a_stop_token_ends_a_sequence_and_is_its_last_token(stub: SchedulerServiceStub) -> None:
    whole = await output_of(stub)
    stream, _ = await GatewayStream.open(stub)
    await stream.submit(make_submit(1, stop=[whole[2]]))
    await stream.read_until_over(1)
    end = stream.ends[1]
    assert stream.outputs[1] == whole[: whole.index(whole[2]) + 1]
    assert (end.reason, end.stop_token_id) == (common_pb2.FINISH_REASON_STOP, whole[2])
    assert end.num_tokens == len(stream.outputs[1])
    stream.close()


async def test_log_probabilities_come_with_their_tokens_and_those_of_the_prompt_before(stream: GatewayStream) -> None:
    output = common_pb2.OutputOptions(logprobs=2, prompt_logprobs=1)
    await stream.submit(make_submit(1, prompt_len=5, max_tokens=3, output=output))
    await stream.read_until_over(1)
    assert [len(line.top_token_ids) for line in stream.logprobs[1]] == [2, 2, 2]
    assert all(line.rank >= 1 and line.logprob <= 0 for line in stream.logprobs[1])
    assert stream.num_prompt_logprobs[1] == 4


async def test_a_gateway_that_connects_again_goes_on_with_its_requests(stub: SchedulerServiceStub) -> None:
    whole = await output_of(stub, max_tokens=100)
    first, _ = await GatewayStream.open(stub, grace_period_ms=60_000)
    await first.submit(make_submit(1, max_tokens=100, nonce=7))
    while len(first.outputs[1]) < 5:
        await first.read()
    first.close()
    second, _ = await GatewayStream.open(stub, grace_period_ms=60_000)
    await second.submit(make_submit(1, max_tokens=100, nonce=7, emitted=first.outputs[1], resubmitted=True))
    # An unknown request continues after the tokens that its gateway has.
    await second.submit(
        make_submit(
            2,
            request_id="request-1",
            max_tokens=100,
            nonce=8,
            emitted=whole[:95],
            resubmitted=True,
            prompt_token_ids=make_submit(1).prompt_token_ids,
            sampling=make_submit(1).sampling,
        )
    )
    await second.end_unread()
    await second.read_until_over(1, 2)
    assert second.outputs[1] == second.outputs[2] == whole
    second.close()


# Credit


async def test_no_more_messages_of_events_come_than_credit_was_given_for(stub: SchedulerServiceStub) -> None:
    stream, _ = await GatewayStream.open(stub)
    await stream.give_credit(2)
    await stream.submit(make_submit(1, max_tokens=30))
    while stream.num_events < 2:
        await stream.read()
    # Readiness needs no credit.
    assert (await stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=0))).remaining_requests == 1
    await stream.read()
    assert (stream.readiness, stream.num_events) == ([False], 2)
    await stream.give_credit(1_000)
    await stream.read_until_over(1)
    assert len(stream.outputs[1]) == 30
    stream.close()


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"credit": {"messages": 0}},
        {"credit": {"messages": 1, "taken": 5}},
        {"hello": {"gateway_id": "g"}},
        {"batch": {"messages": [NESTED.SerializeToString()]}},
    ],
)
async def test_a_message_that_makes_no_sense_ends_the_stream(stream: GatewayStream, message: dict) -> None:
    await stream.say(**message)
    assert isinstance(await end_of(stream.call), InvalidArgument)


# Requests that end early


async def test_an_abort_is_answered_by_what_the_request_cost_and_no_token_follows(stream: GatewayStream) -> None:
    for handle in (1, 3):
        await stream.submit(make_submit(handle, max_tokens=MANY))
    while len(stream.outputs[1]) < 3:
        await stream.read()
    await stream.abort(1, wants_usage=True)
    # The request's only sequence.
    await stream.abort(3, sequence_index=0, wants_usage=True)
    # An unknown request is answered without usage, and only if the gateway wants usage; no other event follows.
    await stream.abort(8)
    await stream.abort(9, wants_usage=True)
    await stream.say(detach={"handle": 9})
    await stream.end_unread()
    await stream.read_until_over(1, 3, 9)
    assert stream.completed.keys() == {1, 3, 9}
    assert not stream.completed[9].HasField("usage")
    assert stream.completed[3].HasField("usage")
    num_tokens = len(stream.outputs[1])
    assert stream.completed[1].usage.prompt_tokens == 5
    assert 3 <= stream.completed[1].usage.generated_tokens < MANY
    await stream.submit(make_submit(2))
    await stream.read_until_over(2)
    assert len(stream.outputs[1]) == num_tokens


async def test_what_is_not_kept_cannot_be_resumed_found_or_cancelled(
    stub: SchedulerServiceStub, stream: GatewayStream
) -> None:
    await stream.say(resume={"handle": 4, "request_id": "nobody's"})
    await stream.read_until_over(4)
    failure = stream.failed[4]
    assert (failure.code, failure.reason) == (code_pb2.NOT_FOUND, "REQUEST_NOT_FOUND")
    for call in (
        stub.FindDurable(scheduler_pb2.FindDurableRequest(request_id="nobody's")),
        stub.Cancel(scheduler_pb2.CancelRequest(request_id="nobody's")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        error = from_rpc_error(caught.value)
        assert isinstance(error, NotFound)
        assert error.reason == "REQUEST_NOT_FOUND"


# Draining


async def test_a_scheduler_that_drains_says_so_refuses_what_is_new_and_finishes_what_runs(
    stub: SchedulerServiceStub, stream: GatewayStream
) -> None:
    await stream.submit(make_submit(1, max_tokens=100))
    await stream.read()
    draining = stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000))
    while not stream.readiness:
        await stream.read()
    assert stream.readiness == [False]
    await stream.submit(make_submit(2))
    await stream.read_until_over(2)
    failure = stream.failed[2]
    assert (failure.code, failure.reason) == (code_pb2.UNAVAILABLE, "DRAINING")
    late = stub.Connect()

    async def refusal() -> None:
        await late.wait_for_connection()
        await late.code()

    # A refusal now could meet the first message on its way, which grpc reports as INTERNAL.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(refusal(), 0.1)
    hello = scheduler_pb2.Hello(gateway_id="late", protocol=SCHEDULER_PROTOCOL.message())
    await late.write(scheduler_pb2.ConnectRequest(hello=hello))
    error = await end_of(late)
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"
    await stream.read_until_over(1)
    assert len(stream.outputs[1]) == 100
    assert (await draining).remaining_requests == 0


# Pins


async def test_a_prefix_is_pinned_in_whole_blocks_until_it_is_let_go_of(stub: SchedulerServiceStub) -> None:
    pin = scheduler_pb2.PinPrefixRequest(token_ids=encode_int32(range(40)), time_to_live_ms=60_000)
    pinned = await stub.PinPrefix(pin)
    assert (pinned.pinned_tokens, pinned.pinned_blocks) == (32, 2)
    assert (await stub.PinPrefix(pin)).pin_id == pinned.pin_id
    unpin = scheduler_pb2.UnpinPrefixRequest(pin_id=pinned.pin_id)
    await stub.UnpinPrefix(unpin)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.UnpinPrefix(unpin)
    assert from_rpc_error(caught.value).reason == "PIN_NOT_FOUND"


# Watching, only with the real scheduler; tests set the frames of the fake one

WATCHED = pytest.mark.parametrize("stub", ["scheduler_svc"], indirect=True)


@WATCHED
async def test_the_first_frame_is_whole_and_others_come_though_nothing_happens(stub: SchedulerServiceStub) -> None:
    """tests/unit/scheduler_svc/core/test_view.py shows that the frames add up."""
    for include_memory in (False, True):
        call = stub.Watch(scheduler_pb2.WatchRequest(include_memory=include_memory))
        async with asyncio.timeout(30):
            first, second = await call.read(), await call.read()
            assert first.is_whole
            assert not second.is_whole
            assert first.numbers.ready
            assert min(first.numbers.num_blocks, first.numbers.block_size, first.numbers.max_num_seqs) > 0
            assert first.HasField("memory") == second.HasField("memory") == include_memory
    await stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=1))
    async with asyncio.timeout(30):
        while not (frame := await call.read()).numbers.draining:
            pass
    assert not frame.numbers.ready


async def test_what_has_no_sense_for_a_pool_is_refused(stub: SchedulerServiceStub) -> None:
    pin = scheduler_pb2.PinPrefixRequest(token_ids=encode_int32(range(15)), time_to_live_ms=60_000)
    for call in (stub.PinPrefix(pin), stub.ReadBlock(scheduler_pb2.ReadBlockRequest(block_id=1 << 30))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert isinstance(from_rpc_error(caught.value), InvalidArgument)
