"""The files of assets/quire-tiny fit together, and fit the corpus that trained them."""

import json
from pathlib import Path
from random import Random
from typing import Any

import jinja2
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from assets.training.conversations import BOS_ID, CHAT_TEMPLATE, END, SPECIAL_TOKENS, Conversation, document
from assets.training.tool_lessons import TOOL_KINDS, make_reworded_conversation, make_tool_conversation

DIRECTORY = Path(__file__).parents[3] / "assets" / "quire-tiny"


def read_json(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / name).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def test_special_tokens_have_the_ids_that_the_corpus_assumes(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode("Once upon a time").ids[0] == BOS_ID
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]


@pytest.mark.parametrize("text", ["Hello, Quire!", "naïve café", "日本語 🙂", "tab\tand\nline", "  two  spaces  "])
def test_every_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_chat_template_writes_what_the_model_was_trained_on() -> None:
    assert read_json("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    conversation = Conversation("any", (), (("Hi", "Hello!"), ("Bye", "Goodbye!")), system="Be brief.")
    messages = conversation.messages()
    trained = "".join(text for text, _ in document(conversation))
    assert template.render(messages=messages, bos_token="<s>") == trained
    prompt = template.render(messages=messages[:-1], bos_token="<s>", add_generation_prompt=True)
    assert trained.startswith(prompt)


@pytest.fixture(scope="module")
def templates() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DIRECTORY)


def render(templates: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(templates.apply_chat_template(messages, tokenize=False, **options))


def test_the_template_writes_conversations_with_tools_as_they_were_trained(templates: PreTrainedTokenizerBase) -> None:
    rng = Random(6)
    drawn = [make(rng) for make in (make_tool_conversation, make_reworded_conversation) for _ in range(100)]
    for conversation in drawn + [draw(rng, held_out=True) for draw in TOOL_KINDS.values() for _ in range(100)]:
        tools = [tool.definition() for tool in conversation.tools] or None
        trained = "".join(text for text, _ in document(conversation))
        assert render(templates, conversation.messages(), tools=tools) == trained
        if conversation.exchanges[-1][1] == conversation.exchanges[0][1]:
            prompt = render(templates, conversation.messages()[:-1], tools=tools, add_generation_prompt=True)
            assert prompt + conversation.last_answer() + END == trained


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a given location",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": ["integer", "null"], "title": "Days"},
                "radius": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                "other": {},
            },
            "required": ["location"],
            "additionalProperties": False,
        },
    },
}
WEATHER_LINE = (
    '{"name": "get_weather", "description": "Get the current weather in a given location", "parameters": {'
    '"location": "string: The city and state, e.g. San Francisco, CA", "unit": ["celsius", "fahrenheit"], '
    '"days": "integer", "radius": "number", "other": "any"}, "required": ["location"]}'
)


def test_a_schema_is_shown_by_names_types_descriptions_and_values(templates: PreTrainedTokenizerBase) -> None:
    shown = render(templates, [{"role": "user", "content": "Hi"}], tools=[WEATHER])
    assert shown == f"<s><|system|><tools>\n{WEATHER_LINE}\n</tools><|end|><|user|>Hi<|end|>"


def test_arguments_may_be_an_object_or_its_text(templates: PreTrainedTokenizerBase) -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return [{"role": "assistant", "content": "Well.", "tool_calls": calls}]

    expected = '<s><|assistant|>Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|end|>'
    assert render(templates, call({"a": "é"})) == render(templates, call('{"a": "é"}')) == expected
