"""Unary calls to all schedulers: to find and cancel requests, pin prefixes, and manage caches and memory."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from gateway.replicas.generation_request import GenerationRequest, NamedAdapter
from gateway.replicas.link import SchedulerLink
from gateway.replicas.request_messages import adapter_message, request_from_submit
from quire.messages.arrays import encode_int32
from quire.rpc.errors import DeadlineExceeded, NotFound, QuireError, Unavailable, error_for_code
from quire.runtime import clock
from quire.scheduler.v1 import scheduler_pb2
from quire.service.histograms import Distribution

_TIMEOUT_S = 5.0
_SLEEP_TIMEOUT_S, _WAKE_UP_TIMEOUT_S = 60.0, 630.0
_LOAD_TIMEOUT_S = 1.0
# A replica keeps a copy of a request that moves away. If both replicas answer within this time, the copies are
# compared; a replica that hangs does not delay the reader for longer.
_OTHERS_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A durable request at a scheduler.

    Attributes:
        is_over: Whether it has ended.
        num_generated_tokens: Its tokens so far, in all sequences that are returned.
        address: The address of the scheduler.
    """

    request: GenerationRequest
    is_over: bool
    num_generated_tokens: int
    address: str


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix; `num_tokens` counts only whole blocks."""

    pin_id: str
    num_tokens: int
    num_blocks: int
    time_to_live_ms: int


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The present load of a replica. Request counts are for one gateway, all other values for all gateways.

    Attributes:
        num_running: Running requests.
        num_waiting: Requests that are queued or swapped out.
        num_held: Queued requests that cannot start until another request or a worker has prepared their data.
        kv_cache_usage: Share of the KV blocks that are in use.
        step_tokens: Distribution of the tokens computed per step; None if not reported.
        num_drafted: Number of samples with drafts, and of their draft tokens.
        num_accepted_at: Number of accepted draft tokens, by their position after the sample.
    """

    num_running: int
    num_waiting: int
    num_held: int
    kv_cache_usage: float
    step_tokens: Distribution | None = None
    num_drafted: tuple[int, int] = (0, 0)
    num_accepted_at: Sequence[int] = ()


class SchedulerCalls:
    """Calls all replicas at once, since any replica may have a request, or get a request with a pinned prefix."""

    def __init__(self, links: Mapping[str, SchedulerLink]) -> None:
        self._links = links
        # Cancellations without an answer yet. The event loop has only weak references to its tasks.
        self._late: set[asyncio.Task[Any]] = set()

    async def find_durable(self, tenant: str, request_id: str) -> FoundRequest:
        """Finds a durable request. If it has moved and several replicas have copies, returns the one that still runs
        and has most tokens. Replicas that answer much later than the first one that has the request are ignored.

        Raises:
            NotFound: no replica has it.
            Unavailable: no replica that answered has it, and one did not answer, or none is known yet.
        """
        asking = self._ask_all("FindDurable", scheduler_pb2.FindDurableRequest(tenant=tenant, request_id=request_id))
        try:
            answers = await _answers(asking, request_id, others_wait_s=_OTHERS_WAIT_S)
        finally:
            for task in asking:
                task.cancel()
        address, answer = max(answers.items(), key=lambda found: (not found[1].is_over, found[1].generated_tokens))
        return FoundRequest(request_from_submit(answer.submit), answer.is_over, answer.generated_tokens, address)

    async def loads(self, gateway_id: str) -> dict[str, ReplicaLoad]:
        """The loads of the replicas that answer within a second, by address."""
        request = scheduler_pb2.GetStateRequest(gateway_id=gateway_id)
        asked = [link for link in self._links.values() if link.is_connected]
        states = await asyncio.gather(*(_outcome(link, "GetState", request, _LOAD_TIMEOUT_S) for link in asked))
        return {
            link.address: _load_from(state)
            for link, state in zip(asked, states, strict=True)
            if not isinstance(state, QuireError)
        }

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Ends a request of any gateway, durable or not. Returns when one replica has ended it; other replicas end
        their copies later. Raises the same errors as `find_durable`."""
        await _answers(self._cancel_everywhere(tenant, request_id), request_id, others_wait_s=0)

    async def cancel_copies(self, tenant: str, request_id: str) -> None:
        """Ends copies of a request that this gateway has ended, on replicas that had it before. Waits only for replicas
        that answer soon, so that the id is free for another request there."""
        await asyncio.wait(self._cancel_everywhere(tenant, request_id), timeout=_OTHERS_WAIT_S)

    def _cancel_everywhere(self, tenant: str, request_id: str) -> dict[asyncio.Task[Any], str]:
        asking = self._ask_all("Cancel", scheduler_pb2.CancelRequest(tenant=tenant, request_id=request_id))
        for task in asking:
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        return asking

    # The id of a pin is derived from its content, so it is the same on all replicas. If one replica fails, the pins on
    # the others stay, since they may be older; pinning or unpinning again makes all replicas equal.

    async def pin(
        self,
        tenant: str,
        token_ids: Sequence[int],
        time_to_live_ms: int,
        *,
        timeout_s: float | None,
        adapter: NamedAdapter | None = None,
        replica: str | None = None,
    ) -> Pin:
        """Pins a prefix on this replica, or on every connected one; returns the shortest pin.

        Raises:
            QuireError: a replica rejects it or does not answer, or no replica is connected.
        """
        request = scheduler_pb2.PinPrefixRequest(
            tenant=tenant,
            token_ids=encode_int32(token_ids),
            time_to_live_ms=time_to_live_ms,
            adapter=adapter_message(adapter),
        )
        answers, errors = await self._ask_connected("PinPrefix", request, timeout_s, replica)
        if errors:
            raise errors[0]
        pins = [Pin(each.pin_id, each.pinned_tokens, each.pinned_blocks, time_to_live_ms) for each in answers]
        return min(pins, key=lambda pin: pin.num_tokens)

    async def unpin(self, tenant: str, pin_id: str, *, timeout_s: float | None) -> None:
        """Ends a pin on every connected replica.

        Raises:
            QuireError: NotFound if no replica has it; else the error of a replica.
        """
        request = scheduler_pb2.UnpinPrefixRequest(tenant=tenant, pin_id=pin_id)
        answers, errors = await self._ask_connected("UnpinPrefix", request, timeout_s)
        for error in errors:
            if not isinstance(error, NotFound):
                raise error
        if not answers:
            raise errors[0]

    # Operations of administrators on all replicas. Every connected replica gets the call, even if others fail.
    # The error names the replicas that failed: a disconnected replica may still hold its memory, or still sleep.

    async def reset_prefix_cache(self) -> int:
        """Clears all prefix caches; returns the number of cleared blocks. Raises QuireError as `_all`."""
        answers = await self._all("ResetPrefixCache", scheduler_pb2.ResetPrefixCacheRequest(), _TIMEOUT_S)
        return sum(each.forgotten_blocks for each in answers)

    async def sleep(self, *, discard_weights: bool) -> None:
        """Makes every replica free the memory of its KV pool, and optionally of the weights. Raises QuireError as
        `_all`."""
        await self._all("Sleep", scheduler_pb2.SleepRequest(discard_weights=discard_weights), _SLEEP_TIMEOUT_S)

    async def wake_up(self) -> None:
        """Ends the sleep of every replica. Raises QuireError as `_all`."""
        await self._all("WakeUp", scheduler_pb2.WakeUpRequest(), _WAKE_UP_TIMEOUT_S)

    async def are_asleep(self) -> bool:
        """Whether all connected replicas sleep. Raises QuireError if one of them does not answer."""
        states, errors = await self._ask_connected("GetState", scheduler_pb2.GetStateRequest(), _TIMEOUT_S)
        if errors:
            raise errors[0]
        return all(state.asleep for state in states)

    async def _all(self, method: str, request: Message, timeout_s: float) -> list[Any]:
        """Calls a method of all replicas and returns their answers.

        Raises:
            QuireError: a replica is not connected, cannot do it or does not answer in time; the others did it. The
                error names each such replica. It is not retryable if the error of one replica is not.
        """
        if not self._links:
            raise _none_known()
        links = list(self._links.values())
        outcomes = await asyncio.gather(*(_outcome(link, method, request, timeout_s) for link in links))
        if failed := [each for each in zip(links, outcomes, strict=True) if isinstance(each[1], QuireError)]:
            raise _error_of_some(failed, len(links))
        return outcomes

    async def _ask_connected(
        self, method: str, request: Message, timeout_s: float | None, replica: str | None = None
    ) -> tuple[list[Any], list[QuireError]]:
        """The answers and errors of all connected replicas, or of `replica`. Raises Unavailable if there are none."""
        links = [each for each in self._links.values() if each.is_connected and replica in (None, each.address)]
        if not links:
            raise Unavailable("no scheduler is connected", reason="NO_SCHEDULER")
        outcomes = await asyncio.gather(*(_outcome(link, method, request, timeout_s) for link in links))
        errors = [outcome for outcome in outcomes if isinstance(outcome, QuireError)]
        return [outcome for outcome in outcomes if not isinstance(outcome, QuireError)], errors

    def _ask_all(self, method: str, request: Message) -> dict[asyncio.Task[Any], str]:
        """Starts a call to each replica; returns the tasks with the replicas' addresses. Raises Unavailable if no
        replica is known, for example before the first DNS answer."""
        if not self._links:
            raise _none_known()
        outcomes = {address: _outcome(link, method, request, _TIMEOUT_S) for address, link in self._links.items()}
        return {asyncio.create_task(outcome): address for address, outcome in outcomes.items()}


def _load_from(state: scheduler_pb2.GetStateResponse) -> ReplicaLoad:
    load, pool = state.gateway, state.gpu_pool
    usage = pool.used_blocks / pool.total_blocks if pool.total_blocks else 0.0
    steps = state.step_tokens
    step_tokens = Distribution.of(steps.bounds, steps.steps, steps.tokens) if state.HasField("step_tokens") else None
    drafts = state.drafts
    return ReplicaLoad(
        load.running_requests,
        load.waiting_requests,
        load.held_requests,
        usage,
        step_tokens,
        (drafts.samples, drafts.drafts),
        tuple(drafts.accepted_at),
    )


def _error_of_some(failed: Sequence[tuple[SchedulerLink, QuireError]], num_asked: int) -> QuireError:
    """One error that names the error of each failed replica."""
    errors = [error for _, error in failed]
    error = next((each for each in errors if not each.is_retryable), errors[0])
    if num_asked == 1:
        return error
    told = [f"{num_asked - len(failed)} of {num_asked} replicas did it"]
    told += [
        each.message if link.address in each.message else f"scheduler {link.address}: {each.message}"
        for link, each in failed
    ]
    return error_for_code(error.code, "; ".join(told), reason=error.reason, retry_after_ms=error.retry_after_ms)


def no_such_request(request_id: str) -> NotFound:
    """The error for a request that does not exist, has ended, or belongs to another tenant."""
    description = f'"{request_id[:128]}" names no running request'
    return NotFound.of_field("request_id", description, reason="REQUEST_NOT_FOUND")


def _none_known() -> Unavailable:
    return Unavailable("no scheduler is known yet", reason="NO_SCHEDULER")


async def _answers(asking: Mapping[asyncio.Task[Any], str], request_id: str, *, others_wait_s: float) -> dict[str, Any]:
    """The successful answers by address, at least one. After the first one, the other replicas have `others_wait_s` to
    answer."""
    found: dict[str, Any] = {}
    errors: list[QuireError] = []
    pending = set(asking)
    deadline = None
    while pending:
        timeout = None if deadline is None else max(deadline - clock.monotonic(), 0)
        done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        # In the order of the replicas: the order of a set differs from process to process.
        for task in [each for each in asking if each in done]:
            answer = task.result()
            if isinstance(answer, QuireError):
                errors.append(answer)
            else:
                found[asking[task]] = answer
        if found and deadline is None:
            deadline = clock.monotonic() + others_wait_s
    if found:
        return found
    for error in errors:
        if isinstance(error, DeadlineExceeded):
            # The gateway has set the time limit, so the caller may retry.
            raise Unavailable(f"a scheduler did not answer within {_TIMEOUT_S:g} s") from error
        if not isinstance(error, NotFound):
            raise error
    raise no_such_request(request_id)


async def _outcome(link: SchedulerLink, method: str, request: Message, timeout_s: float | None) -> Any:
    """The answer of one replica, or its QuireError as a value."""
    try:
        return await link.ask(method, request, timeout_s)
    except QuireError as error:
        return error
