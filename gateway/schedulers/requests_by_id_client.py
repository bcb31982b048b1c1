"""The scheduler's methods about requests by their ids, asked of all replicas, since any of them may have one."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from gateway.requests.request import GenerationRequest
from gateway.schedulers.scheduler_client import SchedulerClient
from gateway.schedulers.submitted_convert import request_from_submit
from quire.rpc.errors import FieldViolation, NotFound, QuireError
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

Answer = TypeVar("Answer")
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DurableState:
    """How far a durable request is: whether it has ended, and its tokens so far, of all sequences that are returned."""

    is_over: bool
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A durable request, and the scheduler that has it."""

    request: GenerationRequest
    state: DurableState
    client: SchedulerClient


async def find_durable(clients: Iterable[SchedulerClient], tenant: str, request_id: str) -> FoundRequest:
    """Where several replicas have it, since it has moved from one to another: the one that it runs on and that is
    ahead, else the one that has most of it.

    Raises:
        NotFound: no replica has it.
        Unavailable: none has it that could be asked, and one could not.
    """
    asked = scheduler_pb2.FindDurableRequest(tenant=tenant, request_id=request_id)
    answers = await _answers(clients, lambda stub: stub.FindDurable(asked, timeout=_TIMEOUT_S), request_id)
    client, answer = max(answers, key=lambda found: (not found[1].is_over, found[1].generated_tokens))
    return FoundRequest(request_from_submit(answer.submit), _state(answer), client)


async def durable_state(client: SchedulerClient, tenant: str, request_id: str) -> DurableState:
    """Asks one replica. Raises NotFound where it does not have the request, Unavailable where it could not be asked."""
    asked = scheduler_pb2.FindDurableRequest(tenant=tenant, request_id=request_id, state_only=True)
    return _state(await client.ask(lambda stub: stub.FindDurable(asked, timeout=_TIMEOUT_S)))


async def cancel_by_id(clients: Iterable[SchedulerClient], tenant: str, request_id: str) -> None:
    """Ends a request, durable or not, whichever gateway reads it. Raises as `find_durable` does."""
    asked = scheduler_pb2.CancelRequest(tenant=tenant, request_id=request_id)
    await _answers(clients, lambda stub: stub.Cancel(asked, timeout=_TIMEOUT_S), request_id)


def no_such_request(request_id: str) -> NotFound:
    """What a caller is told of a request that is not its tenant's, or not there (any more)."""
    description = f'"{request_id[:128]}" names no running request'
    violation = FieldViolation("request_id", description)
    return NotFound(f"request_id {description}", reason="REQUEST_NOT_FOUND", violations=[violation])


def _state(answer: scheduler_pb2.FindDurableResponse) -> DurableState:
    return DurableState(answer.is_over, answer.generated_tokens)


async def _answers(
    clients: Iterable[SchedulerClient],
    call: Callable[[scheduler_pb2_grpc.SchedulerServiceStub], Awaitable[Answer]],
    request_id: str,
) -> list[tuple[SchedulerClient, Answer]]:
    """What the replicas answer that do not answer with an error, in their order: one at least."""
    clients = list(clients)
    answers = await asyncio.gather(*(_answer(client, call) for client in clients))
    found = [
        (client, answer) for client, answer in zip(clients, answers, strict=True) if not isinstance(answer, QuireError)
    ]
    if found:
        return found
    for answer in answers:
        if isinstance(answer, QuireError) and not isinstance(answer, NotFound):
            raise answer
    raise no_such_request(request_id)


async def _answer(
    client: SchedulerClient, call: Callable[[scheduler_pb2_grpc.SchedulerServiceStub], Awaitable[Answer]]
) -> Answer | QuireError:
    try:
        return await client.ask(call)
    except QuireError as error:
        return error
