"""Tool calls over HTTP with the real vocabularies of several families, by the openai client, streamed."""

import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import safetensors.torch
import tokenizers
from openai import AsyncOpenAI

from quire.model_files.model_directory import ModelDirectory
from tests.real.models import real_model
from tests.support.serving import serving

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

# The model, a template if it is not its own, and the first tokens of a call: one token, which a bias makes the model
# write, or a chain, which changed weights make it write in order. Llama's call is not constrained: the chain has all.
MODELS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {
    "Qwen 2.5": ("qwen2_5", None, ("<tool_call>",)),
    "Qwen 3": ("qwen3", None, ("<tool_call>",)),
    "DeepSeek V3": ("deepseek_v3", "deepseek-ai-DeepSeek-V3.1", ("<｜tool▁calls▁begin｜>",)),
    "Llama 3.1": (
        *("llama3_1", None),
        (
            *("ĊĊ", '{"', "name", '":', 'Ġ"', "now", '","', "parameters", '":{"', "utc", '"', ":", "true", "}}"),
            "<|eot_id|>",
        ),
    ),
    "Mistral NeMo": ("mistral_nemo", None, ("[TOOL_CALLS]",)),
    "gpt-oss": ("gptoss", None, ("assistant", "<|channel|>", "comment", "ary", "Ġto", "=", "functions", ".")),
    "Gemma": ("gemma3", "unsloth-functiongemma-270m-it", ("<start_function_call>",)),
}
# Models whose template has marks for which the vocabulary of another model of the family has unused tokens.
_RENAMED = {
    "Gemma": {"<unused0>": "<start_function_call>", "<unused1>": "<end_function_call>", "<unused2>": "<escape>"}
}
# A call ends their messages: templates refuse several calls, or one token ends both the call and the answer.
_SINGLE = ("Llama 3.1", "gpt-oss")
_CITIES, _UNITS = ["Paris", "Oslo", "名古屋"], ["C", "F"]


def tool(name: str, description: str, properties: dict[str, Any]) -> Any:
    fields = {"properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": name, "description": description, "parameters": {"type": "object"} | fields}
    return {"type": "function", "function": function}


TOOLS: Any = [
    tool(
        "get_weather",
        "The weather of a city.",
        {
            "city": {"type": "string", "enum": _CITIES},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"type": "string", "enum": _UNITS},
        },
    ),
    tool("now", "The time.", {"utc": {"type": "boolean"}}),
]


def directory_of(name: str, folder: Path) -> Path:
    """A copy of the model's directory. DeepSeek's templates write calls and no tools: here they get the tools in
    front."""
    model, template, begins = MODELS[name]
    made = folder / "model"
    shutil.copytree(real_model(model, template), made)
    if name == "DeepSeek V3":
        file = made / "chat_template.jinja"
        file.write_text("{% if tools %}{{ tools | tojson }}{% endif %}" + file.read_text("utf-8"), "utf-8")
    for file in (made / "tokenizer.json", made / "tokenizer_config.json") if name in _RENAMED else ():
        text = file.read_text("utf-8")
        for unused, mark in _RENAMED[name].items():
            text = text.replace(unused, mark)
        file.write_text(text, "utf-8")
    if len(begins) > 1:
        steer(made, begins)
    return made


def steer(directory: Path, tokens: tuple[str, ...]) -> None:
    """Changes the weights so that each of the tokens is followed by the next one, whatever came before."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = [tokenizer.token_to_id(token) for token in tokens]
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embeddings = weights["model.embed_tokens.weight"]
    for token_id, following in itertools.pairwise(ids):
        hidden = embeddings[token_id] / embeddings[token_id].pow(2).mean().sqrt() * weights["model.norm.weight"]
        weights["lm_head.weight"][following] = 100 * hidden / hidden.pow(2).sum()
    safetensors.torch.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=MODELS)
async def served(request, tmp_path_factory) -> AsyncIterator[tuple[str, AsyncOpenAI]]:
    directory = directory_of(request.param, tmp_path_factory.mktemp("model"))
    async with (
        serving(model=str(directory), num_gpu_blocks=256, dtype="float32", max_model_len=2048) as running,
        AsyncOpenAI(base_url=f"http://{running.server.http_address}/v1", api_key="-", timeout=300) as client,
    ):
        yield request.param, client


async def streamed(client: AsyncOpenAI, name: str, messages: list[Any], **options: Any) -> dict[str, Any]:
    """The assistant's message of a streamed answer, as clients put it together."""
    calls: list[dict[str, Any]] = []
    text, reasons = "", []
    # A model of random weights reasons without an end.
    body: dict[str, Any] = {"thinking_token_budget": 4} if name in ("Qwen 3", "DeepSeek V3") else {}
    if name == "gpt-oss" and options["tool_choice"] != "auto":
        # The texts that end its reasoning and begin its next message, in an order that it finds by chance.
        tokenizer = tokenizers.Tokenizer.from_file(str(real_model("gptoss") / "tokenizer.json"))
        ending = (tokenizer.token_to_id(token) for token in ("<|end|>", "<|start|>", "assistant"))
        body = {"logit_bias": {str(token_id): 100 for token_id in ending}}
    stream = await client.chat.completions.create(
        model="", messages=messages, tools=TOOLS, stream=True, max_tokens=1200, extra_body=body, **options
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
    assert not text.strip() or name == "gpt-oss"
    return {"role": "assistant", "content": None, "tool_calls": calls}


def token_id_of(name: str, token: str) -> str:
    """Its id as a key of `logit_bias`."""
    original = {mark: unused for unused, mark in _RENAMED.get(name, {}).items()}
    directory = ModelDirectory.open(real_model(*MODELS[name][:2]))
    found = tokenizers.Tokenizer.from_buffer(directory.tokenizer_json()).token_to_id(original.get(token, token))
    assert found is not None
    return str(found)


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
    name, client = served
    messages: list[Any] = [{"role": "user", "content": "Weather and time, please."}]
    for turn in range(3):
        options = (
            {"tool_choice": "required"}
            if turn < 2
            else {"tool_choice": {"type": "function", "function": {"name": "now"}}}
        )
        # A model of random weights has no reason to end; a single call ends by itself.
        message = await streamed(client, name, messages, seed=turn, parallel_tool_calls=False, **options)
        assert len(message["tool_calls"]) == 1
        assert_fitting(message)
        messages += [message, *results_of(message)]


async def test_a_turn_of_two_calls_is_followed_by_another(served):
    name, client = served
    functions = ("get_weather", {"city": "Oslo", "days": 2, "unit": "C"}), ("now", {"utc": True})
    calls = [
        {"id": f"abcdefgh{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for n, (name, arguments) in enumerate(functions)
    ]
    two = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [{"role": "user", "content": "Weather and time, please."}, two, *results_of(two)]
    message = await streamed(client, name, messages, tool_choice="required", parallel_tool_calls=False)
    assert_fitting(message)


async def test_several_calls_in_one_answer(served):
    """A model of random weights ends after one call, or after more, as it draws."""
    name, client = served
    wanted = 1 if name in _SINGLE else 2
    for seed in range(20):
        asked = [{"role": "user", "content": "Please."}]
        message = await streamed(client, name, asked, seed=seed, tool_choice="required")
        assert_fitting(message)
        if len(message["tool_calls"]) >= wanted:
            return
    raise AssertionError("none of 20 answers has several calls")


async def test_a_call_that_the_model_begins_by_itself_fits(served):
    name, client = served
    begin, *more = MODELS[name][2]
    message = await streamed(
        client,
        name,
        [{"role": "user", "content": "Weather, please."}],
        tool_choice="auto",
        parallel_tool_calls=False,
        logit_bias={} if more else {token_id_of(name, begin): 100},
    )
    assert len(message["tool_calls"]) == 1
    assert_fitting(message)
