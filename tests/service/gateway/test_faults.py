"""Schedulers that refuse, fail, repeat themselves, vanish and come back."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from gateway.replicas import link
from gateway.replicas.live import LiveRequest
from gateway.text.tokenizer import Tokenizer as GatewayTokenizer
from quire.arrays import decode_int32, encode_int32
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import Cancelled, DeadlineExceeded, Internal, NotFound, Unavailable
from quire.scheduler.v1 import scheduler_pb2
from tests.support.gateway_process import collect, collected, error_of, running_gateway, stream_request
from tests.support.grpc_types import EOF
from tests.support.rig import TOKENIZER, expected_ids


def queue_full():
    return scheduler_pb2.RequestFailure(
        code=code_pb2.RESOURCE_EXHAUSTED, reason="QUEUE_FULL", message="the queue is full", retry_after_ms=250
    )


async def test_a_durable_request_that_waits_here_and_is_known_to_no_scheduler_can_be_cancelled(gateway, scheduler):
    """The fake scheduler finds nothing by an id, as a real one does for what it has refused for now."""
    with scheduler.standing_still():
        call = gateway.generation.GenerateStream(stream_request(request_id="story", durable=True))
        await scheduler.until(lambda: scheduler.live)
        await gateway.generation.Cancel(generation_pb2.CancelRequest(request_id="story"))
        error = await error_of(call)
    assert isinstance(error, Cancelled)
    assert error.reason == "CANCELLED_BY_ID"
    again = await error_of(gateway.generation.Cancel(generation_pb2.CancelRequest(request_id="story")))
    assert isinstance(again, NotFound)


async def test_a_stream_goes_on_after_its_scheduler_was_lost_which_gets_parameters_seed_and_tokens(gateway, scheduler):
    scheduler.step_delay_s = 0.01
    request = stream_request("hello", max_tokens=40, request_id="kept", output={"prompt_logprobs": 0})
    request.sampling.temperature = 0.5
    call = gateway.generation.GenerateStream(request)
    responses = [await call.read()]
    await scheduler.restart()
    while (response := await call.read()) is not EOF:
        responses.append(response)
    stream = collected(responses)
    assert stream.token_ids == expected_ids("hello", 40)
    assert stream.text == TOKENIZER.decode(stream.token_ids)
    assert [entry.chosen.token_id for entry in stream.completed.prompt_logprobs] == TOKENIZER.encode("hello").ids[1:]
    first, second = scheduler.submits[0], scheduler.submits[-1]
    assert first.handle == second.handle
    assert list(first.emitted) == []
    emitted = decode_int32(second.emitted[0].token_ids, "token_ids").tolist()
    assert emitted == expected_ids("hello", len(emitted))
    assert emitted
    assert second.resubmitted
    assert second.num_prompt_logprobs == len(stream.completed.prompt_logprobs)
    second.ClearField("num_prompt_logprobs")
    second.ClearField("emitted")
    second.ClearField("resubmitted")
    assert first == second


# What a scheduler may send that cannot be: a token after missing ones, and columns of different lengths.
UNSOUND: dict[str, dict[str, Any]] = {
    "gap": {"offsets": encode_int32([3]), "token_ids": encode_int32([99])},
    "malformed": {"offsets": b"\0\0\0"},
    "unexpected": {"offsets": encode_int32([0]), "token_ids": encode_int32([99])},
}


@pytest.mark.parametrize("fault", UNSOUND)
async def test_what_a_scheduler_cannot_have_meant_heals_by_a_new_stream(gateway, scheduler, fault, monkeypatch):
    """Also where reading it raises an error that nobody thought of."""
    scheduler.emits.clear()
    reading = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request("hello", max_tokens=12))))
    await scheduler.until(lambda: scheduler.live)
    with monkeypatch.context() as patched:
        if fault == "unexpected":
            patched.setattr(link, "event_batch_from", lambda message: 1 / 0)
        columns: dict[str, Any] = {"handles": encode_int32(list(scheduler.live)), "sequence_indices": encode_int32([0])}
        scheduler.send(scheduler_pb2.TokenEvents(**columns | UNSOUND[fault]))
        await scheduler.until(lambda: scheduler.connections == 2 and scheduler.live)
    scheduler.emits.set()
    assert (await reading).token_ids == expected_ids("hello", 12)


async def test_request_that_ran_before_outwaits_a_full_queue(gateway, scheduler):
    scheduler.emits.clear()
    reading = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request("hello", max_tokens=12))))
    await scheduler.until(lambda: scheduler.live)
    refusal = queue_full()
    refusal.retry_after_ms = 10
    scheduler.refusal.append(refusal)
    scheduler.emits.set()
    await scheduler.restart()
    assert (await reading).token_ids == expected_ids("hello", 12)
    assert len(scheduler.submits) == 3


async def test_waiting_for_a_lost_scheduler_ends(scheduler):
    async with running_gateway(scheduler, connect_timeout=0.1, failover_delay=0.1) as gateway:
        scheduler.step_delay_s = 0.01
        running = asyncio.create_task(error_of(gateway.generation.GenerateStream(stream_request(max_tokens=500))))
        await scheduler.until(lambda: scheduler.live)
        await scheduler.stop()
        new = await error_of(gateway.generation.GenerateStream(stream_request("hello")))
        assert isinstance(new, Unavailable)
        assert new.reason == "NO_SCHEDULER"
        assert isinstance(await running, Unavailable)
        await scheduler.start()


async def test_scheduler_whose_clock_went_back_is_used_and_what_ran_goes_on_there(gateway, scheduler):
    scheduler.emits.clear()
    running = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request("running"))))
    await scheduler.until(lambda: scheduler.live)
    await scheduler.stop()
    scheduler.epoch -= 500
    await scheduler.start()
    scheduler.emits.set()
    assert (await running).token_ids == expected_ids("running", 8)
    stream = await collect(gateway.generation.GenerateStream(stream_request("hello")))
    assert stream.token_ids == expected_ids("hello", 8)


async def test_request_that_only_the_scheduler_remembers_is_aborted(gateway, scheduler):
    forgotten = scheduler_pb2.Submit(handle=77, request_id="forgotten")
    forgotten.stopping.max_tokens = 10_000
    scheduler.remember(forgotten)
    await scheduler.until(lambda: scheduler.aborted)
    assert scheduler.aborted == ["forgotten"]


async def test_deadline_aborts_the_request(gateway, scheduler):
    scheduler.emits.clear()
    request = generation_pb2.GenerateRequest(text="hello", request_id="late")
    # A deadline may pass before the request comes to the scheduler.
    for timeout_s in (0.2, 2, 20):
        error = await error_of(gateway.generation.Generate(request, timeout=timeout_s))
        assert isinstance(error, DeadlineExceeded)
        if scheduler.submits:
            break
    await scheduler.until(lambda: scheduler.aborted)
    assert scheduler.aborted == ["late"]


class DetokenizerThatRaises:
    """Of a request, in its last token."""

    def __init__(self, detokenizer, num_tokens):
        self._detokenizer = detokenizer
        self._num_left = num_tokens

    def push(self, token_id):
        self._num_left -= 1
        if not self._num_left:
            raise ZeroDivisionError("nobody thought of this")
        return self._detokenizer.push(token_id)

    def flush(self):
        return self._detokenizer.flush()


@pytest.fixture
def raising_detokenizers(monkeypatch):
    """The next requests that are opened get detokenizers that raise at their fourth token, as many as are set."""
    real, left = GatewayTokenizer.detokenizer, [0]

    def made(self, *, include_special_tokens, shown):
        detokenizer = real(self, include_special_tokens=include_special_tokens, shown=shown)
        left[0] -= 1
        return DetokenizerThatRaises(detokenizer, 4) if left[0] >= 0 else detokenizer

    monkeypatch.setattr(GatewayTokenizer, "detokenizer", made)
    return left


async def test_a_request_whose_events_cannot_be_applied_fails_alone_and_is_aborted(
    gateway, scheduler, raising_detokenizers, caplog
):
    scheduler.emits.clear()
    raising_detokenizers[0] = 1
    broken = asyncio.create_task(
        error_of(gateway.generation.GenerateStream(stream_request("hello", max_tokens=500, request_id="broken")))
    )
    await scheduler.until(lambda: scheduler.live)
    other = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request("other", max_tokens=30))))
    await scheduler.until(lambda: len(scheduler.live) == 2)
    scheduler.emits.set()
    error = await broken
    assert isinstance(error, Internal)
    assert (error.reason, "nobody thought" in error.message) == ("UNEXPECTED", False)
    assert (await other).token_ids == expected_ids("other", 30)
    await scheduler.until(lambda: scheduler.aborted)
    assert (scheduler.aborted, scheduler.connections) == (["broken"], 1)
    assert sum(record.exc_info is not None for record in caplog.records) == 1


async def test_a_request_that_cannot_be_ended_when_its_scheduler_is_lost_fails_alone(gateway, scheduler, monkeypatch):
    scheduler.emits.clear()
    reading = [
        asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request(text, max_tokens=12))))
        for text in ("hello", "other")
    ]
    await scheduler.until(lambda: len(scheduler.live) == 2)
    real, broken = LiveRequest.end_if_complete, []

    def end_if_complete(self):
        if not broken or broken == [self]:
            broken[:] = [self]
            raise ZeroDivisionError("nobody thought of this")
        real(self)

    monkeypatch.setattr(LiveRequest, "end_if_complete", end_if_complete)
    scheduler.break_streams()
    await scheduler.until(lambda: scheduler.connections == 2 and scheduler.live)
    scheduler.emits.set()
    outcomes = await asyncio.gather(*reading, return_exceptions=True)
    failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert [type(outcome) for outcome in failed] == [grpc.aio.AioRpcError]
    assert len(outcomes) == 2


@pytest.mark.parametrize("fault", ["cannot be serialized", "cannot be written"])
async def test_a_stream_that_cannot_be_written_to_is_opened_anew(gateway, scheduler, monkeypatch, fault):
    scheduler.emits.clear()
    reading = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request("hello", max_tokens=12))))
    leaving = gateway.generation.GenerateStream(stream_request("leaves", max_tokens=500))
    await scheduler.until(lambda: len(scheduler.live) == 2)
    broken = []

    def abort(stream, *args, **kwargs):
        broken.append(args)
        stream._send(
            SimpleNamespace(SerializeToString=lambda: 1 / 0 if fault == "cannot be serialized" else "no bytes")
        )

    with monkeypatch.context() as patched:
        patched.setattr(link.SchedulerLink, "abort", abort)
        leaving.cancel()
        await scheduler.until(lambda: scheduler.connections == 2 and scheduler.live)
    assert broken
    scheduler.emits.set()
    assert (await reading).token_ids == expected_ids("hello", 12)
    assert len(scheduler.live) == 0


async def test_a_completed_request_is_not_aborted(gateway, scheduler):
    await collect(gateway.generation.GenerateStream(stream_request("first")))
    await collect(gateway.generation.GenerateStream(stream_request("durable", durable=True)))
    # What was sent before an abort that is needed came before it.
    call = gateway.generation.GenerateStream(stream_request("last", max_tokens=500, request_id="last"))
    await call.read()
    call.cancel()
    await scheduler.until(lambda: scheduler.aborted)
    assert len(scheduler.aborted_handles) == 1


async def test_a_request_that_cannot_be_submitted_fails_alone(gateway, scheduler, monkeypatch):
    real = link.submit_message

    def submit_message(live):
        if live.request.request_id == "broken":
            raise ZeroDivisionError("nobody thought of this")
        return real(live)

    monkeypatch.setattr(link, "submit_message", submit_message)
    broken = error_of(gateway.generation.GenerateStream(stream_request("hello", request_id="broken")))
    other = collect(gateway.generation.GenerateStream(stream_request("other", max_tokens=12)))
    error, stream = await asyncio.gather(broken, other)
    assert isinstance(error, Internal)
    assert error.reason == "UNEXPECTED"
    assert stream.token_ids == expected_ids("other", 12)
    assert scheduler.connections == 1
