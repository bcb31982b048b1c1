"""Responses that a gateway keeps."""

from dataclasses import fields
from typing import Any

import pytest

from gateway.api.responses.store import MemoryStore, StoredResponse
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.rpc.errors import InvalidArgument, NotFound

RESPONSE = StoredResponse(b"{}", (ChatMessage("user", "hello"),))
SIZE = RESPONSE.num_bytes


def test_what_is_kept_is_found_by_its_tenant_alone():
    store = MemoryStore(10 * SIZE)
    store.add("one", "a", RESPONSE)
    assert store.get("one", "a") is RESPONSE
    assert store.get("two", "a") is None
    with pytest.raises(NotFound, match="not known to this gateway"):
        store.find("two", "a")
    with pytest.raises(InvalidArgument, match="send the items of the earlier turns in input") as raised:
        store.earlier_messages("one", "b")
    assert raised.value.violations[0].field == "previous_response_id"
    store.remove("one", "a")
    assert store.get("one", "a") is None
    with pytest.raises(NotFound):
        store.remove("one", "a")


def test_the_tenant_that_holds_most_loses_the_one_used_longest_ago():
    store = MemoryStore(4 * SIZE)
    store.add("small", "s", RESPONSE)
    for name in "abc":
        store.add("large", name, RESPONSE)
    store.get("large", "a")
    store.add("other", "o", RESPONSE)
    kept = [(tenant, name) for tenant, name in [("small", "s"), ("large", "a"), ("large", "b"), ("large", "c"),
            ("other", "o")] if store.get(tenant, name)]  # fmt: skip
    assert kept == [("small", "s"), ("large", "a"), ("large", "c"), ("other", "o")]


LONG = "x" * 1_000_000


def test_a_text_counts_with_the_memory_that_it_takes():
    # One character beyond the basic plane makes every character of a text take four bytes.
    assert StoredResponse(b"", [ChatMessage("user", LONG + "\U0001f98a")]).num_bytes >= 4_000_000


def test_one_that_is_too_large_displaces_nothing():
    store = MemoryStore(2 * SIZE)
    store.add("one", "a", RESPONSE)
    store.add("one", "b", StoredResponse(b"x" * 2 * SIZE, ()))
    assert store.get("one", "a")
    assert store.get("one", "b") is None


@pytest.mark.parametrize("name", [each.name for each in fields(ChatMessage) if each.name != "tool_calls"])
def test_every_field_of_a_message_counts(name):
    values: dict[str, Any] = {"role": "user", "content": "", name: LONG}
    message = ChatMessage(**values)
    assert StoredResponse(b"", [message]).num_bytes >= len(LONG)


@pytest.mark.parametrize("name", [each.name for each in ToolCall.DESCRIPTOR.fields])
def test_every_field_of_a_tool_call_counts(name):
    message = ChatMessage("assistant", "", tool_calls=[ToolCall(**{name: LONG})])
    assert StoredResponse(b"", [message]).num_bytes >= len(LONG)
