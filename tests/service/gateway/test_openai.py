"""OpenAI's API in front of a fake scheduler: requests to the scheduler, and answers, whole and as a stream."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.auth.caller import Access
from quire.messages.arrays import decode_int32
from tests.support.fake_scheduler import counting_rule, scripted
from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile
from tests.support.rig import SPEECH, TOKENIZER
from tests.support.tokenizers import byte_level, write_model_directory


async def events_of(response: httpx.Response) -> AsyncIterator[str]:
    """The text after "data: " of each event. Asserts that there is no other text."""
    async for line in response.aiter_lines():
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


async def read_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> tuple[list[Any], bool]:
    """All chunks of a stream, and whether it ended with [DONE]. It must end within 20 seconds."""
    async with asyncio.timeout(30), client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [event async for event in events_of(response)]
    is_done = bool(events) and events[-1] == "[DONE]"
    return [json.loads(event) for event in (events[:-1] if is_done else events)], is_done


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(rig):
    return rig.http


async def complete(client, **fields) -> dict:
    response = await client.post(COMPLETIONS, json={"prompt": "hello"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def error_of(client, path, **fields) -> tuple[int, dict]:
    response = await client.post(path, json=({"messages": HELLO} if path == CHAT else {"prompt": "hello"}) | fields)
    return response.status_code, response.json()["error"]


async def test_a_refused_id_is_not_sent_back_in_a_header_that_clients_could_not_read(client):
    answer = await client.post(COMPLETIONS, json={"prompt": "a", "request_id": "9" * 70_000})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert "x-request-id" not in answer.headers


@pytest.mark.parametrize(("add_special_tokens", "first"), [(None, "<s>"), (True, "<s>"), (False, "he")])
async def test_special_tokens_are_added_unless_they_are_not_wanted(client, rig, add_special_tokens, first):
    answer = await complete(client, add_special_tokens=add_special_tokens, echo=True, max_tokens=1)
    token_ids = decode_int32(rig.scheduler.submits[0].prompt_token_ids, "prompt").tolist()
    assert TOKENIZER.id_to_token(token_ids[0]) == first
    assert answer["choices"][0]["text"].startswith("hello")


@pytest.mark.parametrize(("kept", "num_tokens"), [(3, 3), (-1, 1023)])
async def test_a_prompt_that_is_too_long_may_be_truncated_to_its_end(client, rig, kept, num_tokens):
    text = "hello " * 1500
    whole = TOKENIZER.encode(text).ids
    for path, body in ((COMPLETIONS, {"prompt": text}), (COMPLETIONS, {"prompt": whole}), (CHAT, {"messages": [
        {"role": "user", "content": text}]})):  # fmt: skip
        response = await client.post(path, json=body | {"max_tokens": 1, "truncate_prompt_tokens": kept})
        assert response.status_code == 200, response.text
        sent = decode_int32(rig.scheduler.submits[-1].prompt_token_ids, "prompt").tolist()
        assert len(sent) == num_tokens == response.json()["usage"]["prompt_tokens"]
        if path == COMPLETIONS:
            assert sent == whole[-num_tokens:]
    for value in (0, -2, 5000):
        status, error = await error_of(client, COMPLETIONS, truncate_prompt_tokens=value)
        assert (status, error["param"]) == (400, "truncate_prompt_tokens")


@pytest.mark.parametrize(
    ("files", "code"),
    [({}, "no_chat_template"), ({"chat_template__jinja": "{{ raise_exception('no') }}"}, "chat_template")],
)
async def test_a_conversation_that_the_model_cannot_take_is_refused(scheduler, tmp_path, files, code):
    directory = write_model_directory(tmp_path / "model", byte_level(), **files)
    async with running_gateway(scheduler, model=str(directory)) as gateway:
        status, error = await error_of(gateway.http, CHAT)
        assert (status, error["param"], error["code"]) == (400, "messages", code)


@pytest.mark.parametrize("prompt", ["hello there", TOKENIZER.encode("hello there").ids])
async def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(client, rig, prompt):
    rig.scheduler.rule = scripted(SPEECH)
    (choice,) = (await complete(client, prompt=prompt, max_tokens=2, echo=True, logprobs=1))["choices"]
    assert choice["text"] == "hello there" + TOKENIZER.decode(SPEECH[:2])
    logprobs = choice["logprobs"]
    prompt_tokens = len(TOKENIZER.encode("hello there").ids)
    assert logprobs["token_logprobs"] == [None, *(float(-each) for each in range(1, prompt_tokens)), -0.5, -0.5]
    assert "".join(logprobs["tokens"]) == "<s>" + choice["text"]
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"][-2] == len("hello there")
    assert logprobs["top_logprobs"][0] is None


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_echo_of_no_tokens_scores_the_prompt_alone(client, rig, streaming):
    fields = {"prompt": "hello there", "max_tokens": 0, "echo": True, "logprobs": 1}
    if streaming:
        response = await client.post(COMPLETIONS, json=fields | {"stream": True})
        chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
        (choice, end) = (chunk["choices"][0] for chunk in chunks)
        assert (end["text"], end["finish_reason"]) == ("", "length")
    else:
        answer = await complete(client, **fields)
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == 0
    assert choice["text"] == "hello there"
    assert len(choice["logprobs"]["tokens"]) == len(TOKENIZER.encode("hello there").ids)


@pytest.mark.parametrize(
    ("method", "path", "said"),
    [
        ("POST", "/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("GET", "/v1/nothing", "is not known here; /docs lists all paths"),
        ("GET", CHAT, "the path allows POST"),
    ],
)
async def test_a_wrong_path_or_method_is_told_the_right_one(client, method, path, said):
    assert said in (await client.request(method, path)).json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [("G" * 10_000, "/v1/models"), ("GET", "/" + "p" * 10_000)])
async def test_a_long_method_or_path_is_not_repeated_whole(client, method, path):
    assert len((await client.request(method, path)).content) < 1000


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status", "code"),
    [
        ("GET", "/v1/nothing", {}, b"", 404, "path_not_found"),
        ("GET", CHAT, {}, b"", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", {}, b"", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", {}, b"", 404, "model_not_found"),
        ("POST", CHAT, {"content-type": "application/json"}, b"{", 400, "malformed_message"),
        ("POST", CHAT, {"content-type": "application/json"}, b"", 400, "malformed_message"),
        ("POST", CHAT, {}, b"[]", 400, "malformed_message"),
        ("POST", CHAT, {"content-type": "text/plain"}, b"{}", 415, "unsupported_media_type"),
        ("POST", CHAT, {"content-encoding": "br"}, b"{}", 415, "unsupported_media_type"),
        ("POST", CHAT, {"content-encoding": "gzip"}, b"{}", 400, "malformed_message"),
        ("POST", CHAT, {"content-encoding": "gzip"}, gzip.compress(b"{}", mtime=0)[:-4], 400, "malformed_message"),
        ("POST", CHAT, {"content-encoding": "gzip"}, gzip.compress(b" " * 5_000_000, mtime=0), 413, "body_too_large"),
        ("POST", "/v1/requests/none/cancel", {}, b"", 404, "request_not_found"),
        ("POST", CHAT, {}, b" " * 5_000_000, 413, "body_too_large"),
        ("POST", "/tokenize", {}, b"{}", 400, "invalid_argument"),
        ("POST", "/tokenize", {}, b'{"prompt": "a", "messages": []}', 400, "invalid_argument"),
        ("POST", "/tokenize", {}, b'{"prompt": 7}', 400, "invalid_argument"),
        ("POST", "/detokenize", {}, b'{"tokens": [9999]}', 400, "invalid_argument"),
        ("POST", "/detokenize", {}, b'{"tokens": [1], "model": "other"}', 404, "model_not_found"),
    ],
)
async def test_every_error_has_openai_s_shape(client, method, path, headers, content, status, code):
    response = await client.request(method, path, headers=headers | {"x-request-id": "trace-1"}, content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == "trace-1"
    assert (await client.get("/health")).status_code == 200


async def test_what_is_not_known_is_ignored_named_and_counted(client):
    asked = {"messages": [HELLO[0] | {"a\r\nb": 1}], "max_tokens": 1, "temprature": 0, "vllm_xargs": {}}
    response = await client.post(CHAT, json=asked)
    assert (response.status_code, response.headers["x-quire-ignored-fields"]) == (
        200,
        "temprature, messages[].a%0D%0Ab",
    )
    assert 'quire_gateway_ignored_fields_total{api="chat"}' in (await client.get("/metrics")).text
    assert "x-quire-ignored-fields" not in (await client.get("/v1/models")).headers
    nameless = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 1, "0": 1, "": 1})
    assert nameless.headers["x-quire-ignored-fields"] == '0, ""'


async def test_strictly_what_is_not_known_is_refused_by_every_api(scheduler):
    bodies = {
        CHAT: {"messages": HELLO},
        COMPLETIONS: {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": HELLO, "max_tokens": 1},
        "/v2/models/quire-tiny/infer": {
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
        },
    }
    async with running_gateway(scheduler, strict_fields=True) as gateway:
        for path, body in bodies.items():
            assert (await gateway.http.post(path, json=body)).status_code == 200
            response = await gateway.http.post(path, json=body | {"temprature": 0})
            assert (response.status_code, "temprature is not a field" in response.text) == (400, True)


@pytest.mark.parametrize(("clamp", "asked", "status"), [
    ("defaults", 32_000, 200), ("defaults", 5001, 400), ("always", 5001, 200), ("never", 32_000, 400),
])  # fmt: skip
async def test_more_tokens_than_are_left_are_cut_down_as_the_operator_says(scheduler, clamp, asked, status):
    async with running_gateway(scheduler, clamp_max_tokens=clamp) as gateway:
        response = await gateway.http.post(CHAT, json={"messages": HELLO, "max_tokens": asked})
        assert response.status_code == status
        assert "context_length_exceeded" in response.text or status == 200
        # Agents of Anthropic's API ask for what its models write.
        body = {"messages": HELLO, "max_tokens": asked}
        assert (await gateway.http.post("/v1/messages", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("template", "is_allowed", "says"),
    [
        ("{{ messages[0].content }}{{ documents[0].text }}", True, ""),
        ("{{ messages", True, "is invalid"),
        ("{{ raise_exception('no') }}", True, "refuses the conversation: no"),
        ("{{ ''.__class__.__mro__ }}", True, "refuses the conversation"),
        ("a" * 70_000, True, "at most 65,536 characters"),
        ("a", False, "--request-chat-templates"),
    ],
)
async def test_a_chat_has_a_template_of_its_own_where_the_operator_allows_it(scheduler, template, is_allowed, says):
    async with running_gateway(scheduler, request_chat_templates=is_allowed) as gateway:
        documents = [{"text": " there"}] if "documents" in template else None
        body = {"messages": HELLO, "chat_template": template, "documents": documents, "max_tokens": 1}
        response = await gateway.http.post(CHAT, json=body)
    assert says in response.text
    assert response.status_code == (400 if says else 200)
    if not says:
        sent = decode_int32(scheduler.submits[-1].prompt_token_ids, "prompt").tolist()
        assert sent == TOKENIZER.encode("hello there", add_special_tokens=False).ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})])
async def test_tokens_and_times_are_shown_where_they_are_asked_for(client, path, body, stream):
    asked = {"max_tokens": 3, "return_token_ids": True, "include_metrics": True, "prompt_logprobs": 0, "stream": stream}
    text = (await client.post(path, json=body | asked)).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line and "[DONE]" not in line]
    answers = list(map(json.loads, lines))
    choices = [choice for answer in answers for choice in answer["choices"]]
    assert sum(len(choice.get("token_ids", [])) for choice in choices) == 3
    (prompt,) = [part["prompt_token_ids"] for part in (*answers, *choices) if "prompt_token_ids" in part]
    (logprobs,) = [part["prompt_logprobs"] for part in (*answers, *choices) if "prompt_logprobs" in part]
    assert len(prompt) == len(logprobs)
    (metrics,) = [answer["metrics"] for answer in answers if "metrics" in answer]
    assert metrics["time_to_first_token_ms"] > 0
    assert "mean_itl_ms" in metrics
    assert not stream or all("token_ids" in choice for choice in choices)


@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "hello"})])
async def test_what_is_not_asked_for_is_null_in_whole_answers_and_absent_in_streams(client, path, body):
    """As in vLLM; a single token has no time between tokens."""
    names = ("token_ids", "prompt_token_ids", "prompt_logprobs")
    answer = (await client.post(path, json=body | {"max_tokens": 1, "include_metrics": True})).json()
    assert "mean_itl_ms" not in answer["metrics"]
    parts = answer["choices"][0] | answer
    assert {name: parts[name] for name in names} == dict.fromkeys(names)
    streamed = (await client.post(path, json=body | {"max_tokens": 1, "stream": True})).text
    assert not any(name in streamed for name in names)


@pytest.mark.parametrize("headers", [{}, {"x-request-id": "mine"}])
async def test_a_request_is_cancelled_by_its_id_or_its_answer_s(client, rig, headers):
    rig.scheduler.step_delay_s = 0.01
    body = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True}
    making = asyncio.create_task(client.post(CHAT, json=body, headers=headers))
    await rig.scheduler.until(lambda: rig.scheduler.live and rig.scheduler.submits)
    request_id = rig.scheduler.submits[-1].request_id
    assert request_id.startswith("chatcmpl-mine-" if headers else "chatcmpl-")
    assert (await client.post(f"/v1/requests/{request_id}/cancel")).json()["cancelled"]
    assert (await making).json()["error"]["code"] == "cancelled_by_id"


async def test_all_parts_of_a_packed_body_are_read(client):
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    parts = gzip.compress(body[:10]) + gzip.compress(body[10:])
    assert (await client.post(CHAT, content=parts, headers=headers)).status_code == 200
    answer = await client.post(CHAT, content=gzip.compress(body) + b"more", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed_message")


async def test_a_body_that_comes_in_pieces_has_the_same_limit(client):
    async def pieces():
        for _ in range(5):
            yield b" " * 1_000_000

    response = await client.post(CHAT, content=pieces())
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


async def test_a_body_that_the_client_waits_to_send_is_refused_at_once(rig):
    reader, writer = await asyncio.open_connection(*rig.gateway.gateway.http_address.split(":"))
    writer.write(
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000000\r\nExpect: 100-continue\r\n\r\n".encode()
    )
    async with asyncio.timeout(30):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_a_request_id_of_the_client_comes_back(client):
    for path in (CHAT, "/health", "/v1/models", "/nothing"):
        body = {"messages": HELLO, "max_tokens": 1} if path == CHAT else None
        response = await client.request("POST" if body else "GET", path, json=body, headers={"X-Request-Id": "mine 7"})
        assert response.headers.get_list("x-request-id") == ["mine 7"]


async def test_tokenize_and_detokenize(client):
    answer = (await client.post("/tokenize", json={"prompt": "hello", "return_token_strs": True})).json()
    token_ids = TOKENIZER.encode("hello").ids
    assert answer == {
        "count": len(token_ids),
        "max_model_len": 1024,
        "tokens": token_ids,
        "token_strs": TOKENIZER.encode("hello").tokens,
    }
    bare = (await client.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False})).json()
    assert (bare["tokens"], bare["token_strs"]) == (token_ids[1:], None)
    chat = (await client.post("/tokenize", json={"messages": HELLO})).json()
    assert (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json() == {
        "prompt": "<|user|>hello<|end|><|assistant|>"
    }


@pytest.mark.parametrize(("num_prompts", "n"), [(50, 1), (1, 50), (10, 5)])
async def test_log_probabilities_of_prompts_are_bound_over_all_choices_of_a_call(client, rig, num_prompts, n):
    prompts = [[50] * 1000] * num_prompts
    status, error = await error_of(client, COMPLETIONS, prompt=prompts, n=n, max_tokens=1, echo=True, logprobs=20)
    assert (status, error["param"]) == (400, "logprobs")
    assert "1,050,000 log probabilities of prompts; a call may ask for at most 1,048,576" in error["message"]
    await rig.scheduler.until(lambda: not rig.scheduler.live)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/rerank", {"query": "hello", "documents": ["a", {"text": "b"}]}),
        ("/v2/rerank", {"query": "hello", "documents": ["a"], "top_n": 1}),
        ("/v1/score", {"text_1": "hello", "text_2": ["a", "b"]}),
    ],
)
async def test_what_a_model_that_generates_text_cannot_do_is_refused_with_the_reason(client, path, body):
    response = await client.post(path, json={"model": "quire-tiny", **body})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "wrong_kind_of_model")
    assert 'model "quire-tiny" generates text' in error["message"]


USAGE = {"stream_options": {"include_usage": True}}


# A body for each path.
BODIES = {CHAT: {"messages": HELLO, "max_tokens": 6}, COMPLETIONS: {"prompt": "hello", "max_tokens": 6}}


PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


@pytest.fixture
def counting_client(rig):
    # Texts that depend on their prompts.
    rig.scheduler.rule = counting_rule
    return rig.http


def text_of(path: str, chunks: list, index: int = 0) -> str:
    """The text of one choice."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices)


@PATHS
async def test_every_chunk_has_the_usage_so_far_where_it_is_continuous(counting_client, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks, is_done = await read_stream(counting_client, path, BODIES[path] | {"stream_options": options})
    whole = (await counting_client.post(path, json=BODIES[path])).json()["usage"]
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


async def test_ids_and_objects_are_those_of_openai(counting_client):
    for path, prefix, kind, chunk_kind in (
        (CHAT, "chatcmpl-", "chat.completion", "chat.completion.chunk"),
        (COMPLETIONS, "cmpl-", "text_completion", "text_completion"),
    ):
        response = await counting_client.post(path, json=BODIES[path])
        whole = response.json()
        chunks, _ = await read_stream(counting_client, path, BODIES[path])
        assert whole["id"].startswith(prefix)
        assert response.headers["x-request-id"] == whole["id"]
        assert (whole["object"], chunks[0]["object"]) == (kind, chunk_kind)
        assert whole["model"] == "quire-tiny"
        assert whole["system_fingerprint"].startswith("quire-")


async def test_prompts_of_one_completion_keep_their_order(counting_client, rig):
    prompts = ["hello", "good bye", "the little dragon"]
    alone = [
        (await counting_client.post(COMPLETIONS, json={"prompt": prompt})).json()["choices"][0]["text"]
        for prompt in prompts
    ]
    whole = (await counting_client.post(COMPLETIONS, json={"prompt": prompts})).json()
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == list(enumerate(alone))
    chunks, is_done = await read_stream(counting_client, COMPLETIONS, {"prompt": prompts} | USAGE)
    assert is_done
    assert [text_of(COMPLETIONS, chunks, index) for index in range(3)] == alone
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["completion_tokens"] == 48


async def test_a_model_s_name_may_have_slashes(scheduler):
    async with (
        running_gateway(scheduler, served_model_name="org/model") as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http,
    ):
        assert (await http.get("/v1/models/org/model")).json()["id"] == "org/model"
        assert (await http.post(COMPLETIONS, json={"prompt": "a", "model": "org/model"})).status_code == 200


async def test_an_agents_hint_of_priority_is_heard_as_far_as_its_key_allows(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    key = keys.add("acme", access=Access(max_priority=5))
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway:
        headers = {"authorization": f"Bearer {key}"}
        for hints, priority in [
            ({"priority": 3, "latency_sensitivity": 0.5}, 3),
            ({"priority": 70}, 5),
            ({"priority": -(10**9)}, -100),
            ({"osl": 5}, 0),
            ({"osl": -1}, 0),
        ]:
            body = {"messages": HELLO, "max_tokens": 1, "nvext": {"agent_hints": hints}}
            answer = await gateway.http.post(CHAT, json=body, headers=headers)
            assert (answer.status_code, scheduler.submits[-1].priority) == (200, priority)
            # A hint without effect is reported.
            ignored = "nvext.agent_hints.latency_sensitivity" if "latency_sensitivity" in hints else None
            assert answer.headers.get("x-quire-ignored-fields") == ignored


async def test_blocks_are_kept_for_as_long_as_an_agent_hints_where_its_key_may_pin(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    may_pin, may_not = (keys.add(name, access=Access(may_pin=name == "acme")) for name in ("acme", "other"))
    async with running_gateway(scheduler, keys_files=(keys.path,)) as gateway:

        async def ask(key: str, nvext: dict) -> None:
            body = {"messages": HELLO, "max_tokens": 40, "ignore_eos": True, "nvext": nvext}
            answer = await gateway.http.post(CHAT, json=body, headers={"authorization": f"Bearer {key}"})
            assert (answer.status_code, answer.headers.get("x-quire-ignored-fields")) == (200, None)

        for key, nvext in [
            (may_not, {"cache_control": {"type": "ephemeral", "ttl": "30s"}}),
            (may_pin, {"cache_control": {"ttl": "soon"}}),
            (may_pin, {"agent_hints": {"priority": 0}}),
            (may_pin, {"cache_control": {"type": "ephemeral"}}),
            (may_pin, {"cache_control": {"ttl": "90h"}}),
        ]:
            await ask(key, nvext)
        await scheduler.until(lambda: len(scheduler.pin_requests) >= 2)
        assert [each.time_to_live_ms for each in scheduler.pin_requests] == [300_000, 24 * 3_600_000]
        prompt = len(scheduler.submits[-1].prompt_token_ids) // 4
        assert {len(each.token_ids) // 4 for each in scheduler.pin_requests} == {prompt + 40}


async def test_thinking_is_turned_on_and_off_where_there_is_none(gateway):
    for value in (True, False):
        body = {"messages": HELLO, "max_tokens": 1, "enable_thinking": value}
        answer = await gateway.http.post(CHAT, json=body)
        assert (answer.status_code, answer.headers.get("x-quire-ignored-fields")) == (200, "enable_thinking")
    answer = await gateway.http.post(CHAT, json=body | {"chat_template_kwargs": {"enable_thinking": True}})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"logprob_token_ids": [5]}, "without top_logprobs"),
        ({"ignore_eos": True, "structured_outputs": {"regex": "a+"}}, "text with structured_outputs.regex ends"),
        (
            {"structured_outputs": {"regex": "a+"}, "min_tokens": 2, "stop": "x"},
            "both structured_outputs.regex and stop",
        ),
    ],
)
async def test_an_error_calls_all_fields_by_their_names_in_the_body(client, fields, names):
    response = await client.post(CHAT, json={"messages": HELLO, "max_tokens": 8} | fields)
    assert response.status_code == 400
    assert names in response.json()["error"]["message"]
