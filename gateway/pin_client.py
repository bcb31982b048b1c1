"""The scheduler's methods about pins, over the channel of its stream."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import grpc.aio

from gateway.scheduler_client import SchedulerClient
from gateway.scheduler_convert import pin_message, unpin_message
from quire.rpc.errors import Unavailable, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2_grpc

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that one scheduler keeps; `num_tokens` are in whole blocks."""

    pin_id: str
    num_tokens: int
    num_blocks: int


async def pin_prefix(
    client: SchedulerClient, tenant: str, token_ids: Sequence[int], time_to_live_ms: int, timeout_s: float | None
) -> Pin:
    """Raises QuireError: what the scheduler answered, or Unavailable where it is not connected (any more)."""
    request = pin_message(token_ids, time_to_live_ms, tenant)
    answer = await _answer(client, _stub(client).PinPrefix(request, timeout=timeout_s))
    return Pin(answer.pin_id, answer.pinned_tokens, answer.pinned_blocks)


async def unpin_prefix(client: SchedulerClient, tenant: str, pin_id: str, timeout_s: float | None) -> None:
    """Raises QuireError as `pin_prefix` does."""
    await _answer(client, _stub(client).UnpinPrefix(unpin_message(pin_id, tenant), timeout=timeout_s))


def _stub(client: SchedulerClient) -> scheduler_pb2_grpc.SchedulerServiceStub:
    if client.stub is None:
        raise _unconnected(client)
    return client.stub


async def _answer(client: SchedulerClient, call: Awaitable[Answer]) -> Answer:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        # gRPC raises it also in a call whose channel closes, which is no cancellation of ours.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise _unconnected(client) from None


def _unconnected(client: SchedulerClient) -> Unavailable:
    return Unavailable(f"scheduler {client.address} is not connected", reason="NO_SCHEDULER")
