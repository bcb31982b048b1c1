"""Conversion of the scheduler's messages to JSON objects, for the page."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from quire.messages.arrays import decode_int32
from quire.scheduler.v1 import scheduler_pb2

_NAME_BYTES = 8
_MANY_BYTES = 8000
_ARRAYS = ("gone", "progress", "lengths", "tables", "states", "named", "pins", "events")


def is_long(frame: scheduler_pb2.WatchResponse) -> bool:
    """Whether the serialization of the frame takes milliseconds."""
    return len(frame.memory.tables) + len(frame.memory.states) + 4 * len(frame.memory.names) > _MANY_BYTES


def frame_object(address: str, frame: scheduler_pb2.WatchResponse) -> dict[str, Any]:
    """A frame as a JSON object."""
    return {
        "replica": address,
        "is_whole": frame.is_whole,
        "more_follows": frame.more_follows,
        "unix_seconds": frame.unix_seconds,
        "numbers": _plain(frame.numbers),
        "memory": _memory(frame.memory) if frame.HasField("memory") else None,
        "steps": [_plain(each) for each in frame.steps],
        "answers": [_plain(each) for each in frame.answers],
        "waiting": [_plain(each) | {"reason": _reason(each.reason)} for each in frame.waiting],
        "ended": [_plain(each) for each in frame.ended],
    }


def _memory(memory: scheduler_pb2.MemoryChanges) -> dict[str, Any]:
    names = [memory.names[start : start + _NAME_BYTES] for start in range(0, len(memory.names), _NAME_BYTES)]
    return {
        "sequences": [_plain(each) for each in memory.sequences],
        **{name: decode_int32(getattr(memory, name), name).tolist() for name in _ARRAYS},
        "names": [name.hex() if any(name) else "" for name in names],
        "lost_events": memory.lost_events,
    }


def _plain(message: Message) -> dict[str, Any]:
    """A message without repeated fields as an object; absent numbers are None."""
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            value = _plain(value)
        elif field.has_presence and not message.HasField(field.name):
            value = None
        values[field.name] = value
    return values


def _reason(reason: scheduler_pb2.WaitReason) -> str:
    """The reason's name, such as "shared_prefix"; empty for a reason of a later version."""
    if reason not in scheduler_pb2.WaitReason.values():
        return ""
    return scheduler_pb2.WaitReason.Name(reason).removeprefix("WAIT_REASON_").lower()


def block_request(block: int, *, is_host: bool) -> scheduler_pb2.ReadBlockRequest:
    """The request for one block."""
    return scheduler_pb2.ReadBlockRequest(block_id=block, is_host=is_host)


def block_object(answer: scheduler_pb2.ReadBlockResponse, tenant: str, text_of: Callable[[int], str]) -> dict[str, Any]:
    """A block with its owners. `text_of` returns the text of a token; texts are shown only of `tenant`."""
    owners: list[dict[str, Any]] = []
    for owner in answer.owners:
        token_ids = decode_int32(owner.token_ids, "token_ids", minimum=0).tolist()
        owners.append(
            {
                "request_id": owner.request_id,
                "tenant": owner.tenant,
                "sequence_index": owner.sequence_index,
                "logical_index": owner.logical_index,
                "group": owner.group,
                "num_tokens": len(token_ids),
                "tokens": [text_of(each) for each in token_ids] if owner.tenant == tenant else None,
            }
        )
    return {
        "block_hash": answer.block_hash.hex() if answer.HasField("block_hash") else None,
        "ref_count": answer.ref_count,
        "owners": owners,
    }


@dataclass(frozen=True, slots=True)
class StateAt:
    """The state that a scheduler reported, with the time of the report."""

    unix_s: float
    state: scheduler_pb2.GetStateResponse


def state_request(gateway_id: str) -> scheduler_pb2.GetStateRequest:
    """The request for the state of a scheduler, with the tokens of its steps."""
    return scheduler_pb2.GetStateRequest(gateway_id=gateway_id)


def load_sample(now: StateAt, before: StateAt | None) -> dict[str, float]:
    """Queues, batch, memory and times to the first token, and rates since the previous state, if it is from the same
    scheduler. Values that the scheduler does not report are absent."""
    state = now.state
    served = state.served
    sample: dict[str, float] = {
        "waiting": state.waiting_requests,
        "running": state.running_requests,
        "swapped": state.swapped_requests,
        "used": _share(state.gpu_pool.used_blocks, state.gpu_pool),
        "cached": _share(state.gpu_pool.cached_blocks, state.gpu_pool),
    }
    if state.HasField("served"):
        sample["rows"] = served.running_sequences
    if served.HasField("first_token_ms_p50"):
        sample |= {"ttft50": served.first_token_ms_p50, "ttft95": served.first_token_ms_p95}
    if before is None or before.state.scheduler_epoch != state.scheduler_epoch or now.unix_s <= before.unix_s:
        return sample
    counters = {
        "computed": (before.state.step_tokens.tokens, state.step_tokens.tokens),
        "steps": (before.state.steps, state.steps),
        "preemptions": (before.state.preemptions, state.preemptions),
    }
    if state.HasField("served") and before.state.HasField("served"):
        counters["generated"] = before.state.served.generated_tokens, served.generated_tokens
    seconds = now.unix_s - before.unix_s
    return sample | {name: max(0, last - first) / seconds for name, (first, last) in counters.items()}


def _share(blocks: int, pool: scheduler_pb2.PoolState) -> float:
    return blocks / pool.total_blocks if pool.total_blocks else 0.0
