"""Responses that a gateway keeps."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from gateway.api.responses.store import ResponseStore, StoredResponse
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.rpc.errors import InvalidArgument, NotFound
from quire.runtime.settings import ConfigurationError

RESPONSE = StoredResponse(b"{}", (ChatMessage("user", "hello"),))
MESSAGE = {"role": "user", "content": "hello", "name": None, "tool_calls": [], "tool_call_id": None, "reasoning": None}
SIZE = 1000 + len(RESPONSE.body) + len(json.dumps([MESSAGE]))


@pytest.fixture(params=["memory", "file"])
def store_of(request, tmp_path) -> Iterator[Callable[[int], ResponseStore]]:
    """Makes a store for a number of responses."""
    path = None if request.param == "memory" else tmp_path / "kept.db"
    with ExitStack() as made:
        yield lambda number: made.enter_context(closing(ResponseStore(path, number * SIZE)))


@pytest.fixture
def large_store() -> Iterator[ResponseStore]:
    with closing(ResponseStore(None, 1 << 30)) as made:
        yield made


def test_what_is_kept_is_found_by_its_tenant_alone(store_of):
    store = store_of(10)
    store.add("one", "a", RESPONSE)
    assert store.get("one", "a") == RESPONSE
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


def test_the_tenant_that_holds_most_loses_the_one_used_longest_ago(store_of):
    store = store_of(4)
    store.add("small", "s", RESPONSE)
    for name in "abc":
        store.add("large", name, RESPONSE)
    store.get("large", "a")
    store.add("other", "o", RESPONSE)
    kept = [(tenant, name) for tenant, name in [("small", "s"), ("large", "a"), ("large", "b"), ("large", "c"),
            ("other", "o")] if store.get(tenant, name)]  # fmt: skip
    assert kept == [("small", "s"), ("large", "a"), ("large", "c"), ("other", "o")]


async def test_items_are_found_without_holding_the_loop(large_store):
    names = [f"{number:032x}" for number in range(5)]
    for name in names:
        large_store.add("one", f"resp_{name}", StoredResponse(b'{"output": []}', (ChatMessage("user", "hi"),) * 500))
    asked = {f"input[{place}].id": f"msg_{name}in3" for place, name in enumerate(names)}
    num_turns = 0

    async def count_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    found = await large_store.items("one", asked)
    counting.cancel()
    assert list(found) == list(asked.values())
    assert num_turns >= len(names)


async def test_what_references_stand_for_has_a_limit(large_store):
    name = "0" * 32
    large_store.add(
        "one", f"resp_{name}", StoredResponse(b'{"output": []}', (ChatMessage("system", LONG), *RESPONSE.messages))
    )
    asked = {f"input[{place}].id": f"msg_{name}in0" for place in range(1000)}
    with pytest.raises(InvalidArgument, match=r"adds up to 17,.* bytes with earlier ones; the max is 16,") as raised:
        await large_store.items("one", asked)
    assert raised.value.violations[0].field == "input[16].id"
    assert len(await large_store.items("one", dict(list(asked.items())[:16]))) == 1


LONG = "x" * 1_000_000


def test_one_that_is_too_large_displaces_nothing(store_of):
    store = store_of(2)
    store.add("one", "a", RESPONSE)
    store.add("one", "b", StoredResponse(b"x" * 2 * SIZE, ()))
    assert store.get("one", "a")
    assert store.get("one", "b") is None


def test_one_that_is_kept_again_counts_once(store_of):
    store = store_of(2)
    store.add("one", "a", RESPONSE)
    for _ in range(3):
        # Each reader of a durable stream that comes to its end keeps it.
        store.add("one", "b", RESPONSE)
    assert store.get("one", "a")
    store.remove("one", "b")
    store.add("one", "c", RESPONSE)
    assert store.get("one", "a")


def test_a_file_keeps_every_field_of_a_message_and_says_what_is_wrong_with_it(tmp_path):
    call = ToolCall(id="c", name="f", arguments='{"a": "\u00e9"}')
    messages = (ChatMessage("user", "hello", "me"), ChatMessage("assistant", "", tool_calls=(call,), reasoning="hm"))
    kept = StoredResponse(b"{}", (*messages, ChatMessage("tool", "done", tool_call_id="c")))
    with closing(ResponseStore(tmp_path / "kept.db", 1 << 20)) as store:
        store.add("one", "a", kept)
    with closing(ResponseStore(tmp_path / "kept.db", 1 << 20)) as store:
        assert store.get("one", "a") == kept
    (tmp_path / "other").write_bytes(b"no database" * 1000)
    for path in (tmp_path / "other", tmp_path / "none" / "kept.db", tmp_path):
        with pytest.raises(ConfigurationError, match=f"--response-store {path}"):
            ResponseStore(path, 1)
