"""The items of a response's input, in pages."""

import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from gateway.api.responses.store import input_items, item_page
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.rpc.errors import InvalidArgument

MESSAGES = [
    ChatMessage("system", "Be brief."),
    ChatMessage("user", "Where?"),
    ChatMessage("assistant", "I look.", tool_calls=(ToolCall(id="a", name="look", arguments="{}"),), reasoning="Hm."),
    ChatMessage("tool", "here", tool_call_id="a"),
    ChatMessage("assistant", "Here."),
]
ITEMS = input_items("resp_1", MESSAGES)


def test_messages_are_the_items_that_openai_s_client_knows():
    assert [item["type"] for item in ITEMS] == [
        "message", "message", "reasoning", "message", "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert len({item["id"] for item in ITEMS}) == len(ITEMS)
    known = TypeAdapter(ResponseItem)
    for item in ITEMS:
        known.validate_python(item)


def test_pages_follow_each_other():
    for order, expected in (("asc", ITEMS), ("desc", ITEMS[::-1])):
        seen, after = [], {}
        while True:
            page = item_page(ITEMS, {"order": order, "limit": "3"} | after)
            seen += page["data"]
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            if not page["has_more"]:
                break
            after = {"after": page["last_id"]}
        assert seen == expected
    assert item_page(ITEMS, {})["data"] == ITEMS[::-1]
    assert item_page([], {}) == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}


@pytest.mark.parametrize(
    "parameters", [{"limit": "0"}, {"limit": "101"}, {"limit": "x"}, {"order": "up"}, {"after": "x"}, {"before": "x"}]
)
def test_what_a_page_cannot_be_is_refused_by_its_name(parameters):
    with pytest.raises(InvalidArgument, match=next(iter(parameters))):
        item_page(ITEMS, parameters)
