"""OpenAI's API in front of a fake scheduler: streams, and clients that leave or read slowly."""

import pytest

from tests.support.fake_scheduler import counting_rule
from tests.support.sse import read_stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True}}
# A body for each path.
BODIES = {CHAT: {"messages": HELLO, "max_tokens": 6}, COMPLETIONS: {"prompt": "hello", "max_tokens": 6}}
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.fixture
def client(rig):
    # Texts that depend on their prompts.
    rig.scheduler.rule = counting_rule
    return rig.http


def text_of(path: str, chunks: list, index: int = 0) -> str:
    """The text of one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices)


@PATHS
async def test_every_chunk_has_the_usage_so_far_where_it_is_continuous(client, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks, is_done = await read_stream(client, path, BODIES[path] | {"stream_options": options})
    whole = (await client.post(path, json=BODIES[path])).json()["usage"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert is_done
    assert counts == sorted(counts)
    assert counts[0] < counts[-2] == counts[-1] == 6
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        and usage["prompt_tokens"] == whole["prompt_tokens"]
        for usage in (chunk["usage"] for chunk in chunks)
    )
    assert chunks[-1]["usage"] == whole


async def test_ids_and_objects_are_those_of_openai(client):
    for path, prefix, kind, chunk_kind in (
        (CHAT, "chatcmpl-", "chat.completion", "chat.completion.chunk"),
        (COMPLETIONS, "cmpl-", "text_completion", "text_completion"),
    ):
        response = await client.post(path, json=BODIES[path])
        whole = response.json()
        chunks, _ = await read_stream(client, path, BODIES[path])
        assert whole["id"].startswith(prefix)
        assert response.headers["x-request-id"] == whole["id"]
        assert (whole["object"], chunks[0]["object"]) == (kind, chunk_kind)
        assert whole["model"] == "quire-tiny"
        assert whole["system_fingerprint"].startswith("quire-")


async def test_prompts_of_one_completion_keep_their_order(client, rig):
    prompts = ["hello", "good bye", "the little dragon"]
    alone = [
        (await client.post(COMPLETIONS, json={"prompt": prompt})).json()["choices"][0]["text"] for prompt in prompts
    ]
    whole = (await client.post(COMPLETIONS, json={"prompt": prompts})).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(alone))
    chunks, is_done = await read_stream(client, COMPLETIONS, {"prompt": prompts} | USAGE)
    assert is_done
    assert [text_of(COMPLETIONS, chunks, index) for index in range(3)] == alone
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 48
