"""The input of a stored response as pages of a list of items."""

from collections.abc import Mapping, Sequence

from gateway.api.responses.answers import CallHead, InputItem, InputItems, InputText, ItemHead
from gateway.api.responses.write_response import output_text, reasoning_text
from gateway.request.violations import Violations, shortened
from gateway.types import ChatMessage
from quire.rpc.errors import invalid_field

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100
_ORDERS = ("asc", "desc")
# `include` has no effect, since these items lack the fields that it requests.
_PARAMETERS = frozenset({"after", "include", "include[]", "limit", "order"})
_ANSWER, _RESULT = "assistant", "tool"


def input_items(response_id: str, messages: Sequence[ChatMessage]) -> list[InputItem]:
    """The items of a conversation, in its order. Their ids are derived from the id of the response."""
    items: list[InputItem] = []

    def head(prefix: str) -> ItemHead:
        return {"id": f"{prefix}_{response_id.removeprefix('resp_')}in{len(items)}", "status": "completed"}

    for message in messages:
        role, text = message.role, message.content
        if message.reasoning:
            content = [reasoning_text(message.reasoning)]
            items.append({**head("rs"), "type": "reasoning", "summary": [], "content": content})
        if role == _RESULT:
            call_id = message.tool_call_id or ""
            items.append({**head("fco"), "type": "function_call_output", "call_id": call_id, "output": text})
        elif role != _ANSWER:
            part = InputText(type="input_text", text=text)
            items.append({**head("msg"), "type": "message", "role": role, "content": [part]})
        elif text:
            items.append({**head("msg"), "type": "message", "role": role, "content": [output_text(text)]})
        for call in message.tool_calls:
            called: CallHead = {**head("fc"), "call_id": call.id, "name": call.name}
            items.append({"type": "function_call", **called, "arguments": call.arguments})
    return items


def item_page(items: Sequence[InputItem], parameters: Mapping[str, str]) -> InputItems:
    """The page of a list that the query parameters request.

    Raises:
        InvalidArgument: a parameter is unknown or has an invalid value.
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
            raise invalid_field("after", f'is "{shortened(after)}", which is not an item of this response')
        ordered = ordered[position + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > limit,
    }
