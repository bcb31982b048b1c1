"""OpenAI's API in front of a fake scheduler: streams, and clients that leave or read slowly."""

import asyncio
import json
import socket

import httpx
import pytest

from tests.support.fake_scheduler import FakeScheduler, Hypothesis, counting_rule
from tests.support.gateway_process import running_gateway
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
async def test_a_stream_says_what_the_whole_answer_says(client, path):
    whole = (await client.post(path, json=BODIES[path])).json()
    chunks, is_done = await read_stream(client, path, BODIES[path] | USAGE)
    (choice,) = whole["choices"]
    assert is_done
    assert text_of(path, chunks) == (choice["message"]["content"] if path == CHAT else choice["text"])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]) == ([], whole["usage"])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert whole["usage"]["completion_tokens"] == 6
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 6


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


async def test_choices_of_several_prompts_count_on(client, rig):
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 1}
    rig.scheduler.emits.clear()
    answer = asyncio.create_task(client.post(COMPLETIONS, json=body))
    await rig.scheduler.until(lambda: len(rig.scheduler.submits) == 2)
    for handle in list(rig.scheduler.live):
        rig.scheduler.deliver(handle, [Hypothesis([264 + 10 * index], -1.0) for index in range(2)])
    choices = (await answer).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["text"] == choices[2]["text"] != choices[1]["text"] == choices[3]["text"]


async def test_a_slow_reader_gets_everything_once_in_larger_chunks():
    scheduler = FakeScheduler(max_model_len=8192, step_delay_s=0, tokens_per_step=4)
    await scheduler.start()
    async with running_gateway(scheduler) as gateway:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        host, port = gateway.gateway.http_address.split(":")
        await asyncio.get_running_loop().sock_connect(slow, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=slow)
        body = json.dumps(
            {"messages": HELLO, "max_tokens": 6000, "stream": True, "logprobs": True, "top_logprobs": 20}
        ).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await scheduler.until(lambda: scheduler.live)
        await asyncio.wait_for(scheduler.until(lambda: not scheduler.live), 30)
        # Others are served meanwhile.
        async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http:
            assert (await http.post(CHAT, json=BODIES[CHAT])).status_code == 200
        async with asyncio.timeout(30):
            data = await reader.read()
        writer.close()
    await scheduler.stop()
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    sizes = [
        len(choice["logprobs"]["content"])
        for choice in (json.loads(line)["choices"][0] for line in lines)
        if choice["logprobs"]
    ]
    assert sum(sizes) == 6000
    assert 10 < max(sizes) <= 256
    assert b"data: [DONE]" in data
    assert not scheduler.aborted
