"""Unary calls to the schedulers: requests by their ids, and pinned prefixes. All replicas get them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from gateway.replicas.generation_request import GenerationRequest, NamedAdapter
from gateway.replicas.link import SchedulerLink
from gateway.replicas.request_messages import adapter_message, request_from_submit
from quire import clock
from quire.arrays import encode_int32
from quire.histograms import Distribution
from quire.rpc.errors import DeadlineExceeded, NotFound, QuireError, Unavailable, error_for_code
from quire.scheduler.v1 import scheduler_pb2

_TIMEOUT_S = 5.0
_SLEEP_TIMEOUT_S, _WAKE_UP_TIMEOUT_S = 60.0, 630.0
_LOAD_TIMEOUT_S = 1.0
# A replica that has a request keeps a copy of it when it moves to another one. The copies are compared if both replicas
# answer; one that hangs does not delay the reader for longer.
_OTHERS_WAIT_S = 0.25


@dataclass(frozen=True, slots=True)
class FoundRequest:
    """A durable request at a scheduler.

    Attributes:
        is_over: Whether it has ended.
        num_generated_tokens: Its tokens so far, of all sequences that are returned.
        address: The scheduler's.
    """

    request: GenerationRequest
    is_over: bool
    num_generated_tokens: int
    address: str


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that schedulers keep; `num_tokens` are in whole blocks."""

    pin_id: str
    num_tokens: int
    num_blocks: int
    time_to_live_ms: int


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica does now.

    Attributes:
        num_running: Requests of one gateway that run; likewise the next two.
        num_waiting: In the queue, or swapped out.
        num_held: In the queue, until another request or a worker has prepared what they need.
        kv_cache_usage: Share of the blocks that are in use, of all gateways.
        step_tokens: Tokens that its steps computed, of all gateways; None where it does not say.
        num_drafted: Samples that had drafts, and their drafts, of all gateways.
        num_accepted_at: Drafts that were right, by their place behind the sample.
    """

    num_running: int
    num_waiting: int
    num_held: int
    kv_cache_usage: float
    step_tokens: Distribution | None = None
    num_drafted: tuple[int, int] = (0, 0)
    num_accepted_at: Sequence[int] = ()


class SchedulerCalls:
    """Asks all replicas at once, since any of them may have a request, or get one with a pinned prefix."""

    def __init__(self, links: Mapping[str, SchedulerLink]) -> None:
        self._links = links
        # Cancellations without an answer yet: an event loop alone does not keep its tasks alive.
        self._late: set[asyncio.Task[Any]] = set()

    async def find_durable(self, tenant: str, request_id: str) -> FoundRequest:
        """If several replicas have it, since it has moved from one to another: the one that still runs it and has most
        of it. Replicas that answer much later than the first one that has it are ignored.

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
        """By address, what the replicas do now that answer within a second."""
        request = scheduler_pb2.GetStateRequest(gateway_id=gateway_id)
        asked = [link for link in self._links.values() if link.is_connected]
        states = await asyncio.gather(*(_outcome(link, "GetState", request, _LOAD_TIMEOUT_S) for link in asked))
        return {
            link.address: _load_from(state)
            for link, state in zip(asked, states, strict=True)
            if not isinstance(state, QuireError)
        }

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Ends a request, durable or not, at any gateway. Returns when one replica has ended it; copies on other
        replicas end when those answer. Raises as `find_durable` does."""
        await _answers(self._cancel_everywhere(tenant, request_id), request_id, others_wait_s=0)

    async def cancel_copies(self, tenant: str, request_id: str) -> None:
        """Ends copies of a request that this gateway has ended, on replicas that had it before. Waits for the answers
        of replicas that work, so that the id is free for another request, and for no others."""
        await asyncio.wait(self._cancel_everywhere(tenant, request_id), timeout=_OTHERS_WAIT_S)

    def _cancel_everywhere(self, tenant: str, request_id: str) -> dict[asyncio.Task[Any], str]:
        asking = self._ask_all("Cancel", scheduler_pb2.CancelRequest(tenant=tenant, request_id=request_id))
        for task in asking:
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        return asking

    # The id of a pin comes from its content, so it is the same on all replicas. A replica that fails does not undo the
    # others, which may have had the pin before; pinning or unpinning again makes all replicas equal.

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
            QuireError: a replica refuses it or does not answer, or none is connected.
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
            QuireError: NotFound if no replica has it; else the error of one.
        """
        request = scheduler_pb2.UnpinPrefixRequest(tenant=tenant, pin_id=pin_id)
        answers, errors = await self._ask_connected("UnpinPrefix", request, timeout_s)
        for error in errors:
            if not isinstance(error, NotFound):
                raise error
        if not answers:
            raise errors[0]

    # What operators ask of all replicas. Each that can be reached is asked, whatever another one answers, and the error
    # names those that did not do it: a replica that is not connected may hold its memory, or sleep on.

    async def reset_prefix_cache(self) -> int:
        """Forgets cached prefixes on every replica; returns how many blocks had some. Raises QuireError as `_all`."""
        answers = await self._all("ResetPrefixCache", scheduler_pb2.ResetPrefixCacheRequest(), _TIMEOUT_S)
        return sum(each.forgotten_blocks for each in answers)

    async def sleep(self, *, discard_weights: bool) -> None:
        """Has every replica give the memory of its KV pool back, or also that of the weights. Raises QuireError as
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
        """The answers of all replicas, connected or not.

        Raises:
            QuireError: one of them is not connected, cannot do it or does not answer in time; the others did it. It
                names each such replica, and is a refusal where one refuses, which a later call does not mend.
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
        """The answers and the errors of all connected replicas, or of this one. Raises Unavailable if there is none."""
        links = [each for each in self._links.values() if each.is_connected and replica in (None, each.address)]
        if not links:
            raise Unavailable("no scheduler is connected", reason="NO_SCHEDULER")
        outcomes = await asyncio.gather(*(_outcome(link, method, request, timeout_s) for link in links))
        errors = [outcome for outcome in outcomes if isinstance(outcome, QuireError)]
        return [outcome for outcome in outcomes if not isinstance(outcome, QuireError)], errors

    def _ask_all(self, method: str, request: Message) -> dict[asyncio.Task[Any], str]:
        """The calls to all replicas, each with the replica's address. Raises Unavailable where none is known, as before
        the first answer about a name."""
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
    """One error for those of several replicas, each with its own."""
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
    """The error for a request that another tenant has, or that does not exist (any more)."""
    description = f'"{request_id[:128]}" names no running request'
    return NotFound.of_field("request_id", description, reason="REQUEST_NOT_FOUND")


def _none_known() -> Unavailable:
    return Unavailable("no scheduler is known yet", reason="NO_SCHEDULER")


async def _answers(asking: Mapping[asyncio.Task[Any], str], request_id: str, *, others_wait_s: float) -> dict[str, Any]:
    """By address, the answers of the replicas that do not answer with an error: at least one. After the first one, the
    others have `others_wait_s` to answer."""
    found: dict[str, Any] = {}
    errors: list[QuireError] = []
    pending = set(asking)
    deadline = None
    while pending:
        timeout = None if deadline is None else max(deadline - clock.monotonic(), 0)
        done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        # In the order of the replicas: that of a set differs from process to process.
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
            # The limit is the gateway's own: its caller may ask again.
            raise Unavailable(f"a scheduler did not answer within {_TIMEOUT_S:g} s") from error
        if not isinstance(error, NotFound):
            raise error
    raise no_such_request(request_id)


async def _outcome(link: SchedulerLink, method: str, request: Message, timeout_s: float | None) -> Any:
    """The answer of one replica, or its QuireError."""
    try:
        return await link.ask(method, request, timeout_s)
    except QuireError as error:
        return error
