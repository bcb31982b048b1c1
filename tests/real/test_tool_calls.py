"""Tool calls over HTTP with the real vocabularies of several families, by the openai client, streamed."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers
from openai import AsyncOpenAI

from gateway.text.chat import ChatTemplate, special_token_texts
from quire.model_directory import ModelDirectory
from tests.real.models import real_model
from tests.support.serving import serving

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

# The model, a template where it is not its own, and the token that begins a call in its format, if there is one.
MODELS = {
    "Qwen 2.5": ("qwen2_5", None, "<tool_call>"),
    "Qwen 3": ("qwen3", None, "<tool_call>"),
    "DeepSeek V3": ("deepseek_v3", "deepseek-ai-DeepSeek-V3.1", "<｜tool▁calls▁begin｜>"),
    "Llama 3.1": ("llama3_1", None, None),
    "Mistral NeMo": ("mistral_nemo", None, "[TOOL_CALLS]"),
    "gpt-oss": ("gptoss", None, None),
    "Gemma": ("gemma3", "unsloth-functiongemma-270m-it", None),
}
_CITIES, _UNITS = ["Paris", "Oslo", "名古屋"], ["C", "F"]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": _CITIES},
                    "days": {"type": "integer", "minimum": 1, "maximum": 9},
                    "unit": {"type": "string", "enum": _UNITS},
                },
                "required": ["city", "days", "unit"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {
                "type": "object",
                "properties": {"utc": {"type": "boolean"}},
                "required": ["utc"],
                "additionalProperties": False,
            },
        },
    },
]


def directory_of(name: str, folder: Path) -> Path:
    """The model's directory. DeepSeek's templates write calls and no tools: here they get those in front."""
    model, template, _ = MODELS[name]
    real = real_model(model, template)
    if name != "DeepSeek V3":
        return real
    made = folder / real.name
    made.mkdir()
    for file in real.iterdir():
        if file.name != "chat_template.jinja":
            (made / file.name).symlink_to(file)
    source = (real / "chat_template.jinja").read_text(encoding="utf-8")
    (made / "chat_template.jinja").write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}" + source, encoding="utf-8"
    )
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODELS)
async def served(request, tmp_path_factory) -> AsyncIterator[tuple[str, AsyncOpenAI]]:
    directory = directory_of(request.param, tmp_path_factory.mktemp("model"))
    async with (
        serving(model=str(directory), num_gpu_blocks=256, dtype="float32", max_model_len=2048) as running,
        AsyncOpenAI(base_url=f"http://{running.server.http_address}/v1", api_key="-", timeout=300) as client,
    ):
        yield request.param, client


async def streamed(client: AsyncOpenAI, messages: list[Any], **options: Any) -> dict[str, Any]:
    """The assistant's message of a streamed answer, as clients put it together."""
    model = (await client.models.list()).data[0].id
    calls: list[dict[str, Any]] = []
    text, reasons = "", []
    # A model of random weights reasons without an end.
    body: dict[str, Any] = {"thinking_token_budget": 4} if any(each in model for each in ("qwen3", "deepseek")) else {}
    if "gptoss" in model:
        # The texts that end its reasoning and begin its next message, in an order that it finds by chance.
        tokenizer = tokenizers.Tokenizer.from_file(str(real_model("gptoss") / "tokenizer.json"))
        ending = (tokenizer.token_to_id(token) for token in ("<|end|>", "<|start|>", "assistant"))
        body = {"logit_bias": {str(token_id): 100 for token_id in ending}}
    stream = await client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, stream=True, max_tokens=400, extra_body=body, **options
    )
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for each in choice.delta.tool_calls or ():
                if each.index == len(calls):
                    function = {"name": each.function.name, "arguments": ""}
                    calls.append({"id": each.id, "type": "function", "function": function})
                calls[each.index]["function"]["arguments"] += each.function.arguments or ""
    # A call of a named function ends the answer as OpenAI ends it.
    assert reasons == ["stop" if isinstance(options.get("tool_choice"), dict) else "tool_calls"]
    assert not text.strip() or "gptoss" in model
    return {"role": "assistant", "content": None, "tool_calls": calls}


def assert_fitting(message: dict[str, Any]) -> None:
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "now":
            assert list(arguments) == ["utc"]
            assert isinstance(arguments["utc"], bool)
        else:
            assert call["function"]["name"] == "get_weather"
            assert (arguments["city"] in _CITIES, arguments["unit"] in _UNITS) == (True, True)
            assert 1 <= arguments["days"] <= 9


def results_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": "Fine."} for call in message["tool_calls"]]


async def test_three_turns_of_forced_calls(served):
    _, client = served
    messages: list[Any] = [{"role": "user", "content": "Weather and time, please."}]
    for turn in range(3):
        options = (
            {"tool_choice": "required"}
            if turn < 2
            else {"tool_choice": {"type": "function", "function": {"name": "now"}}}
        )
        # A model of random weights has no reason to end; a single call ends by itself.
        message = await streamed(client, messages, seed=turn, parallel_tool_calls=False, **options)
        assert len(message["tool_calls"]) == 1
        assert_fitting(message)
        messages += [message, *results_of(message)]


async def test_a_turn_of_two_calls_is_followed_by_another(served):
    _, client = served
    functions = ("get_weather", {"city": "Oslo", "days": 2, "unit": "C"}), ("now", {"utc": True})
    calls = [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(functions)
    ]
    two = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [{"role": "user", "content": "Weather and time, please."}, two, *results_of(two)]
    message = await streamed(client, messages, tool_choice="required", parallel_tool_calls=False)
    assert_fitting(message)


async def test_a_call_that_the_model_begins_by_itself_fits(served):
    name, client = served
    model, template, begin = MODELS[name]
    if begin is None:
        pytest.skip("no single token begins a call")
    directory = ModelDirectory.open(real_model(model, template))
    token_id = tokenizers.Tokenizer.from_buffer(directory.tokenizer_json()).token_to_id(begin)
    message = await streamed(
        client,
        [{"role": "user", "content": "Weather, please."}],
        tool_choice="auto",
        parallel_tool_calls=False,
        logit_bias={str(token_id): 100},
    )
    assert len(message["tool_calls"]) == 1
    assert_fitting(message)


@pytest.mark.parametrize("name", MODELS)
async def test_the_template_writes_calls_in_a_known_format(name):
    model, template, _ = MODELS[name]
    directory = ModelDirectory.open(real_model(model, template))
    assert directory.chat_template is not None
    texts = special_token_texts(directory.tokenizer_config)
    assert ChatTemplate(directory.chat_template, texts).tool_format is not None
