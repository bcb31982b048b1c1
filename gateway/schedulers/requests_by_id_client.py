"""The scheduler's methods about requests by their ids, asked of all replicas, since any of them may have one."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gateway.requests.request import GenerationRequest
from gateway.schedulers.scheduler_client import SchedulerClient
from gateway.schedulers.submitted_convert import request_from_submit
from quire.rpc.errors import FieldViolation, NotFound, QuireError
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

Answer = TypeVar("Answer")
_TIMEOUT_S = 5.0
# A replica that has a request keeps a copy of it when it moves to another one. The copies are compared where both
# replicas answer; one that hangs does not hold up whoever wants to read on.
_OTHERS_WAIT_S = 0.25


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


class RequestsById:
    """Finds and ends requests by their ids, at whichever replica has them."""

    def __init__(self, clients: Mapping[str, SchedulerClient]) -> None:
        self._clients = clients
        # Cancellations that somebody has not answered yet. An event loop alone does not keep its tasks alive.
        self._late: set[asyncio.Task[Any]] = set()

    async def find_durable(self, tenant: str, request_id: str) -> FoundRequest:
        """Where several replicas have it, since it has moved from one to another: the one that it runs on and that is
        ahead, else the one that has most of it. Replicas that answer much later than the first one that has it are not
        waited for.

        Raises:
            NotFound: no replica has it.
            Unavailable: none has it that could be asked, and one could not.
        """
        asked = scheduler_pb2.FindDurableRequest(tenant=tenant, request_id=request_id)
        asking = self._ask(lambda stub: stub.FindDurable(asked, timeout=_TIMEOUT_S))
        try:
            answers = await _answers(asking, request_id, others_wait_s=_OTHERS_WAIT_S)
        finally:
            for task in asking:
                task.cancel()
        client, answer = max(answers, key=lambda found: (not found[1].is_over, found[1].generated_tokens))
        return FoundRequest(request_from_submit(answer.submit), _state(answer), client)

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Ends a request, durable or not, whichever gateway reads it. Returns when one replica has ended it; where
        others have it, too, it ends there when they answer. Raises as `find_durable` does."""
        asked = scheduler_pb2.CancelRequest(tenant=tenant, request_id=request_id)
        asking = self._ask(lambda stub: stub.Cancel(asked, timeout=_TIMEOUT_S))
        for task in asking:
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        await _answers(asking, request_id, others_wait_s=0)

    def _ask(
        self, call: Callable[[scheduler_pb2_grpc.SchedulerServiceStub], Awaitable[Answer]]
    ) -> "dict[asyncio.Task[Answer | QuireError], SchedulerClient]":
        return {asyncio.create_task(_answer(client, call)): client for client in self._clients.values()}


def no_such_request(request_id: str) -> NotFound:
    """What a caller is told of a request that is not its tenant's, or not there (any more)."""
    description = f'"{request_id[:128]}" names no running request'
    violation = FieldViolation("request_id", description)
    return NotFound(f"request_id {description}", reason="REQUEST_NOT_FOUND", violations=[violation])


def _state(answer: scheduler_pb2.FindDurableResponse) -> DurableState:
    return DurableState(answer.is_over, answer.generated_tokens)


async def _answers(
    asking: "Mapping[asyncio.Task[Answer | QuireError], SchedulerClient]", request_id: str, *, others_wait_s: float
) -> list[tuple[SchedulerClient, Answer]]:
    """What the replicas answer that do not answer with an error: one at least. Once one has, the others have
    `others_wait_s` to do so."""
    found: list[tuple[SchedulerClient, Answer]] = []
    errors: list[QuireError] = []
    pending = set(asking)
    deadline = None
    while pending:
        timeout = None if deadline is None else max(deadline - time.monotonic(), 0)
        done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        for task in done:
            answer = task.result()
            if isinstance(answer, QuireError):
                errors.append(answer)
            else:
                found.append((asking[task], answer))
        if found and deadline is None:
            deadline = time.monotonic() + others_wait_s
    if found:
        return found
    for error in errors:
        if not isinstance(error, NotFound):
            raise error
    raise no_such_request(request_id)


async def _answer(
    client: SchedulerClient, call: Callable[[scheduler_pb2_grpc.SchedulerServiceStub], Awaitable[Answer]]
) -> Answer | QuireError:
    try:
        return await client.ask(call)
    except QuireError as error:
        return error
