"""The scheduler's methods about pins, over the channel of its stream."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.schedulers.scheduler_client import SchedulerClient
from gateway.schedulers.scheduler_convert import pin_message, unpin_message


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that one scheduler keeps; `num_tokens` are in whole blocks."""

    pin_id: str
    num_tokens: int
    num_blocks: int


async def pin_prefix(
    client: SchedulerClient, tenant: str, token_ids: Sequence[int], time_to_live_ms: int, timeout_s: float | None
) -> Pin:
    """Raises QuireError as `SchedulerClient.ask` does."""
    request = pin_message(token_ids, time_to_live_ms, tenant)
    answer = await client.ask(lambda stub: stub.PinPrefix(request, timeout=timeout_s))
    return Pin(answer.pin_id, answer.pinned_tokens, answer.pinned_blocks)


async def unpin_prefix(client: SchedulerClient, tenant: str, pin_id: str, timeout_s: float | None) -> None:
    """Raises QuireError as `SchedulerClient.ask` does."""
    request = unpin_message(pin_id, tenant)
    await client.ask(lambda stub: stub.UnpinPrefix(request, timeout=timeout_s))
