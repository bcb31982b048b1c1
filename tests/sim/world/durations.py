"""Durations in messages, in milliseconds: the receiver must understand the time that the sender or a client meant."""

from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from typing import Any

from gateway.app import Gateway
from quire.client import Usage
from scheduler_svc.service import worker_messages
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.step_loop import StepLoop
from tests.sim.world.traffic import Pin
from worker_svc.protocol.transfers import Move, Transfers

_ROUNDED_S = 0.001
Times = tuple[float, float, float]
"""Seconds that a request spent in the queue, in prefill and in decode."""


def misread_by_gateway(
    gateway: Gateway, address: str, loop: StepLoop, table: Requests, grace_s: float
) -> Iterator[str]:
    """Durations that a gateway and the connected scheduler at this address understand differently. Gateways want their
    requests kept for `grace_s`."""
    link = gateway._models.default.replicas.links.get(address)
    if link is None or link.welcome is None or not link.is_connected:
        return
    connection = table._connections.get(link._hello.hello.gateway_id)
    if connection is not None and _differ(connection.grace_period_s, grace_s):
        yield f"{address} keeps requests for {connection.grace_period_s} s, and a gateway wants {grace_s} s"
    durable_s = table.durable.limits.grace_s
    if _differ(link.welcome.durable_grace_s, durable_s):
        yield f"{address} keeps durable requests for {durable_s} s, not {link.welcome.durable_grace_s} s"
    if link.is_draining and loop.lifecycle.is_draining:
        # A drain without a time limit says 0, and one with a limit may follow.
        said_s, heard_s = loop.lifecycle.leave_after_s, link.leave_after_s
        if said_s and heard_s and _differ(said_s, heard_s):
            yield f"requests are to leave {address} after {said_s} s of a drain, and a gateway takes {heard_s} s"


def watch_worker(transfers: Transfers, report: Callable[[Exception], object]) -> None:
    """Reports durations that a worker understands differently from its scheduler."""
    begin, offer = transfers.move, transfers.offer

    def move_checked(move: Move) -> Coroutine[Any, Any, list[int]]:
        if _differ(move.timeout_s, worker_messages.MOVE_TIMEOUT_S):
            report(AssertionError(f"a worker fetches blocks for {move.timeout_s} s"))
        return begin(move)

    def offer_checked(message: Any) -> None:
        offer(message)
        if _differ(lease_s := transfers._offers[message.lease].lease_s, worker_messages.LEASE_S):
            report(AssertionError(f"a worker offers blocks for {lease_s} s"))

    transfers.move, transfers.offer = move_checked, offer_checked


def misread_pin(asked: Iterable[Pin], tenant: str, token_ids: list[int], time_to_live_s: float) -> str | None:
    """An error if no client of the tenant asked for a pin of this prefix with this time to live; None if one did."""
    pins = [each for each in asked if each.tenant == tenant and [*each.prompt[: len(token_ids)]] == token_ids]
    if all(_differ(each.time_to_live_ms / 1e3, time_to_live_s) for each in pins):
        return f"{tenant} pins {len(token_ids)} tokens for {time_to_live_s} s, which no client has asked for"
    return None


def misread_usage(usage: Usage, told_s: Collection[Times]) -> str | None:
    """An error if a client gets times that no scheduler reported for its request; None if one did. A gateway that
    answers for a lost scheduler reports no time in a queue."""
    times_s = usage.queue_ms / 1e3, usage.prefill_ms / 1e3, usage.decode_ms / 1e3
    is_known = any(not any(map(_differ, times_s, each)) for each in told_s)
    return None if is_known or not usage.queue_ms else f"{usage} of a request whose times were {told_s}"


def _differ(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) > _ROUNDED_S
