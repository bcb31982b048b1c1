"""Lessons with tools and JSON: the template writes what was trained on, calls fit their tools, answers fit the keys."""

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from assets.training.corpus import END, Document, Emphasis
from assets.training.json_questions import JSON_KINDS, make_led_answer
from assets.training.questions import draw
from assets.training.second_course import Shares, second_course_documents
from assets.training.third_course import (
    THIRD_COURSE_TOOL_KINDS,
    draw_reworded_missing,
    make_reworded_conversation,
    third_course_documents,
)
from assets.training.tool_lessons import TOOL_KINDS, make_tool_conversation
from assets.training.tool_skills import SKILLS, draw_ask, draw_tool, has_held_out_name, name_is_held_out
from assets.training.tool_wordings import WORDINGS, describe, ways_to_ask
from assets.training.tools import NO_TOOL_ANSWER, Called, ToolConversation, tool_document

DIRECTORY = Path(__file__).parents[3] / "assets" / "quire-tiny"
Course = Callable[[int, Emphasis, Shares], Iterator[Document]]
DRAWS = 100
SHARES = Shares(old=0.3, tools=0.3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DIRECTORY)


def render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def drawn_conversations(*, held_out: bool) -> list[ToolConversation]:
    rng = Random(5)
    return [draw(rng, held_out=held_out) for draw in TOOL_KINDS.values() for _ in range(DRAWS)]


def test_the_template_writes_conversations_with_tools_as_they_were_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    rng = Random(6)
    drawn = [make(rng) for make in (make_tool_conversation, make_reworded_conversation) for _ in range(DRAWS)]
    for conversation in drawn + drawn_conversations(held_out=True):
        tools = [tool.definition() for tool in conversation.tools] or None
        trained = "".join(segment.text for segment in tool_document(conversation))
        assert render(tokenizer, conversation.messages(), tools=tools) == trained
        if conversation.exchanges[-1][1] == conversation.exchanges[0][1]:
            prompt = render(tokenizer, conversation.messages()[:-1], tools=tools, add_generation_prompt=True)
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


def test_a_schema_is_shown_by_names_types_descriptions_and_values(tokenizer: PreTrainedTokenizerBase) -> None:
    shown = render(tokenizer, [{"role": "user", "content": "Hi"}], tools=[WEATHER])
    assert shown == f"<s><|system|><tools>\n{WEATHER_LINE}\n</tools><|end|><|user|>Hi<|end|>"


def test_only_the_first_line_of_a_description_of_a_parameter_is_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    described = {"a": {"type": "string", "description": " One.\nTwo."}, "b": {"type": "string", "description": " "}}
    function = {"name": "f", "parameters": {"type": "object", "properties": described, "required": ["a", "b"]}}
    shown = render(tokenizer, [{"role": "user", "content": "Hi"}], tools=[{"type": "function", "function": function}])
    assert '<tools>\n{"name": "f", "parameters": {"a": "string: One.", "b": "string"}}\n</tools>' in shown


def test_a_function_without_parameters_or_description_is_shown(tokenizer: PreTrainedTokenizerBase) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    shown = render(tokenizer, [{"role": "developer", "content": "Be brief."}], tools=tools)
    assert shown == '<s><|system|>Be brief.\n<tools>\n{"name": "now", "parameters": {}}\n</tools><|end|>'


def test_arguments_may_be_an_object_or_its_text(tokenizer: PreTrainedTokenizerBase) -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return [{"role": "assistant", "content": "Well.", "tool_calls": calls}]

    expected = '<s><|assistant|>Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|end|>'
    assert render(tokenizer, call({"a": "é"})) == render(tokenizer, call('{"a": "é"}')) == expected


def test_calls_name_a_tool_that_is_there_and_parameters_that_it_has() -> None:
    rng = Random(5)
    reworded = [make_reworded_conversation(rng) for _ in range(3 * DRAWS)]
    unseen = [draw(rng, held_out=True) for draw in THIRD_COURSE_TOOL_KINDS.values() for _ in range(DRAWS)]
    for conversation in drawn_conversations(held_out=False) + reworded + unseen:
        tools = {tool.name: tool for tool in conversation.tools}
        for _, done in conversation.exchanges:
            for call in done.calls if isinstance(done, Called) else ():
                assert set(call.arguments) <= set(tools[call.name].parameters)
                for name, value in call.arguments.items():
                    kind = tools[call.name].parameters[name]
                    if isinstance(kind, tuple):
                        assert value in kind
                    else:
                        kinds = {"string": str, "integer": int, "number": (int, float)}
                        assert isinstance(value, kinds[kind])


def test_what_is_missing_is_not_among_the_tools() -> None:
    rng = Random(13)
    for _ in range(DRAWS):
        conversation = draw_reworded_missing(rng, held_out=True)
        assert conversation.tools
        assert conversation.last_answer() == NO_TOOL_ANSWER


@pytest.mark.parametrize("name", SKILLS)
def test_no_description_and_no_wording_is_on_both_sides_of_the_split(name: str) -> None:
    rng = Random(14)
    unseen, seen = (
        {describe(name, rng, held_out=held_out).rstrip(".") for _ in range(DRAWS)} for held_out in (True, False)
    )
    assert {each.lower() for each in unseen}.isdisjoint(each.lower() for each in seen)
    asks = WORDINGS[name].asks
    assert set(ways_to_ask(name, held_out=True)) | set(ways_to_ask(name, held_out=False)) == set(asks)
    assert len(ways_to_ask(name, held_out=False)) > len(asks) / 2


@pytest.mark.parametrize("name", SKILLS)
def test_values_of_a_call_stand_in_its_question(name: str) -> None:
    rng = Random(7)
    for _ in range(30):
        ask = draw_ask(draw_tool(SKILLS[name], rng, held_out=False), rng, held_out=False)
        assert all(str(value) in ask.text for value in ask.values.values())


def test_no_name_of_a_tool_is_on_both_sides_of_the_split() -> None:
    assert sum(has_held_out_name(skill) for skill in SKILLS.values()) > 0.9 * len(SKILLS)
    assert not name_is_held_out("get weather")
    assert name_is_held_out("get weather forecast")


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_answers_in_json_are_objects_whose_keys_were_asked_for(kind: str) -> None:
    rng = Random(8)
    for _ in range(DRAWS):
        question = draw(JSON_KINDS[kind], rng, held_out=False)
        value = json.loads(question.answer)
        assert json.dumps(value, ensure_ascii=False) == question.answer
        assert kind == "json_bare" or all(key in question.text for key in value)


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_no_json_question_is_on_both_sides_of_the_split(kind: str) -> None:
    rng = Random(9)
    trained = {draw(JSON_KINDS[kind], rng, held_out=False).text for _ in range(DRAWS)}
    assert trained.isdisjoint(draw(JSON_KINDS[kind], rng, held_out=True).text for _ in range(DRAWS))


def test_answers_that_a_schema_leads_to_open_as_the_constraint_does() -> None:
    rng = Random(12)
    for _ in range(DRAWS):
        question, opening = make_led_answer(rng, held_out=False)
        assert question.answer.startswith(opening)
        assert json.loads(question.answer)
        assert "JSON" not in question.text


@pytest.mark.parametrize("course", [second_course_documents, third_course_documents])
def test_documents_of_the_later_courses_are_the_same_for_the_same_seed(course: Course) -> None:
    first, second = (list(islice(course(1, {}, SHARES), 200)) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("course", [second_course_documents, third_course_documents])
def test_segments_with_tools_encode_as_their_whole_document_does(
    tokenizer: PreTrainedTokenizerBase, course: Course
) -> None:
    for document in islice(course(8, {}, SHARES), 200):
        apart = [i for s in document for i in tokenizer(s.text, add_special_tokens=False)["input_ids"]]
        assert apart == tokenizer("".join(s.text for s in document), add_special_tokens=False)["input_ids"]
