"""Messages that no sound scheduler sends, and errors in the gateway's own work for one request: others continue."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gateway.replicas import link
from gateway.replicas.live import LiveRequest
from quire.messages.arrays import encode_int32
from quire.rpc.errors import Internal
from quire.scheduler.v1 import scheduler_pb2
from tests.support.gateway_process import collect, error_of, stream_request
from tests.support.rig import expected_ids

# Messages that a sound scheduler never sends: a token after missing ones, and columns of different lengths.
UNSOUND: dict[str, dict[str, Any]] = {
    "gap": {"offsets": encode_int32([3]), "token_ids": encode_int32([99])},
    "malformed": {"offsets": b"\0\0\0"},
    "unexpected": {"offsets": encode_int32([0]), "token_ids": encode_int32([99])},
}


@pytest.mark.parametrize("fault", UNSOUND)
async def test_what_a_scheduler_cannot_have_meant_heals_by_a_new_stream(gateway, scheduler, fault, monkeypatch):
    """Even if reading it raises an unforeseen error."""
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
    # Messages keep their order: an abort of the completed requests would come before this one.
    call = gateway.generation.GenerateStream(stream_request("last", max_tokens=500, request_id="last"))
    await call.read()
    call.cancel()
    await scheduler.until(lambda: scheduler.aborted)
    # The last request may be aborted twice: tokens on their way then belong to an unknown request.
    assert set(scheduler.aborted_handles) == {scheduler.submits[-1].handle}
    assert scheduler.aborted == ["last"]


async def test_a_request_that_cannot_be_submitted_fails_alone(gateway, scheduler, monkeypatch):
    real = link.submit_message

    def submit_message(live, **options):
        if live.request.request_id == "broken":
            raise ZeroDivisionError("nobody thought of this")
        return real(live, **options)

    monkeypatch.setattr(link, "submit_message", submit_message)
    broken = error_of(gateway.generation.GenerateStream(stream_request("hello", request_id="broken")))
    other = collect(gateway.generation.GenerateStream(stream_request("other", max_tokens=12)))
    error, stream = await asyncio.gather(broken, other)
    assert isinstance(error, Internal)
    assert error.reason == "UNEXPECTED"
    assert stream.token_ids == expected_ids("other", 12)
    assert scheduler.connections == 1
