"""The input of a response that was kept, as items: pages of a list."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.request.violations import Violations, shortened
from gateway.types import ChatMessage
from quire.rpc.errors import invalid_field

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_ORDERS = ("asc", "desc")
# `include` asks for what these items do not have.
_PARAMETERS = frozenset({"after", "include", "include[]", "limit", "order"})
_ANSWER, _RESULT = "assistant", "tool"


def input_items(response_id: str, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The items of a conversation, in its order. Their ids are those of this response."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, item: dict[str, Any]) -> None:
        items.append(
            {"id": f"{prefix}_{response_id.removeprefix('resp_')}in{len(items)}", "status": "completed"} | item
        )

    for message in messages:
        if message.reasoning:
            content = [{"type": "reasoning_text", "text": message.reasoning}]
            add("rs", {"type": "reasoning", "summary": [], "content": content})
        if message.role == _RESULT:
            result = {"call_id": message.tool_call_id, "output": message.content}
            add("fco", {"type": "function_call_output"} | result)
        elif message.role == _ANSWER and message.content:
            part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
            add("msg", {"type": "message", "role": _ANSWER, "content": [part]})
        elif message.role != _ANSWER:
            part = {"type": "input_text", "text": message.content}
            add("msg", {"type": "message", "role": message.role, "content": [part]})
        for call in message.tool_calls:
            fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
            add("fc", {"type": "function_call"} | fields)
    return items


def item_page(items: Sequence[dict[str, Any]], parameters: Mapping[str, str]) -> dict[str, Any]:
    """The page of a list that the parameters of a query ask for.

    Raises:
        InvalidArgument: a parameter is not known, or has a value that it cannot have.
    """
    violations = Violations()
    for name in sorted(parameters.keys() - _PARAMETERS):
        violations.add(name[:80], f"is not known here; the parameters are {', '.join(sorted(_PARAMETERS))}")
    order, after = parameters.get("order", "desc"), parameters.get("after")
    if order not in _ORDERS:
        violations.add("order", f'is "{shortened(order)}"; it must be {" or ".join(_ORDERS)}')
    asked_limit = parameters.get("limit", str(_DEFAULT_LIMIT))
    limit = int(asked_limit) if asked_limit.isdecimal() and asked_limit.isascii() and len(asked_limit) < 4 else 0
    if not 1 <= limit <= _MAX_LIMIT:
        violations.add("limit", f'is "{shortened(asked_limit)}"; it must be in [1, {_MAX_LIMIT}]')
    violations.raise_if_any()
    ordered = list(items if order == "asc" else reversed(items))
    if after is not None:
        position = next((place for place, item in enumerate(ordered) if item["id"] == after), None)
        if position is None:
            raise invalid_field("after", f'is "{shortened(after)}", which is no item of this response')
        ordered = ordered[position + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }
