"""Rules of scripted servers, from JSON and as objects."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from quire.testing import Answer, Failure, Message, Received, Rule, RuleError, ToolCall, When, read_rule_file, rule
from quire.testing.rules import read_rules

RULES = [
    rule("first", Answer(pieces=["a", "b"], cut=True, first_token_s=0.5), name="words", last="^hello", times=3),
    Rule(
        [
            Answer(tool_calls=[ToolCall("add", {"a": [1, None]})], reasoning="why"),
            Answer(error=Failure(429, "slow down", 2.5)),
            Answer(json={"a": 1}, finish="length"),
            Answer(embedding=[0.5, 1.0]),
        ],
        When(headers={"X-Agent": "planner"}, turn=1, key="sk-1"),
        name="calls",
    ),
]


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_rules_are_the_same_after_they_were_written_to_a_file(ending: str, tmp_path: Path) -> None:
    # JSON is YAML, too.
    file = tmp_path / f"rules.{ending}"
    content = {"rules": [asdict(each) for each in RULES]}
    file.write_text(json.dumps(content))
    assert json.loads(json.dumps([asdict(each) for each in read_rule_file(file)])) == json.loads(
        json.dumps(content["rules"])
    )


def test_short_forms_of_answers_are_read() -> None:
    short = [{"answer": "a"}, {"answers": ["b", {"text": "c"}], "name": "named"}]
    assert read_rules({"rules": short}) == [
        Rule([Answer("a")], name="rules[0]"),
        Rule([Answer("b"), Answer("c")], name="named"),
    ]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (5, 'rules are an object with the one field "rules", a list'),
        ({"rule": []}, 'rules are an object with the one field "rules", a list'),
        ({"rules": [5]}, "rules[0]: Input should be an object"),
        ([{"answer": {"txt": "a"}}], "rules[0].answers[0].txt: there is no such field"),
        ([{"answer": {"text": 1}}], "rules[0].answers[0].text: Input should be a valid string"),
        ([{"answer": {"first_token_s": True}}], "rules[0].answers[0].first_token_s: Input should be a valid number"),
        ([{"when": {}}], "rules[0].answers: Field required"),
        ([{"answers": []}], "rules[0]: a rule needs at least one answer"),
        ([{"answer": "a", "answers": []}], "rules[0].answer: there is no such field"),
        ([{"answer": "a", "when": {"last": "("}}], "rules[0].when: last is '(', which is no regular expression"),
        ([{"answer": {"error": {"status": 418}}}], "rules[0].answers[0].error: status is 418; Quire answers with one"),
        ([{"answer": {"text": "a", "json": {}}}], "rules[0].answers[0]: text and json are both the content"),
        ([{"answer": "a", "times": 0}], "rules[0]: times is 0; it must be at least 1"),
        ([{"answer": "a", "name": "n"}] * 2, 'two rules have the name "n"; names must differ'),
    ],
)
def test_rules_that_cannot_work_name_the_place_and_the_expectation(content: Any, says: str) -> None:
    with pytest.raises(RuleError) as caught:
        read_rules({"rules": content} if isinstance(content, list) else content)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("r.json", "{"), ("r.yaml", "a: ["), ("none.json", None)])
def test_a_file_that_cannot_be_read_is_named(name: str, text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RuleError, match=name):
        read_rule_file(tmp_path / name)


REQUEST = Received(
    path="/v1/chat/completions",
    headers={"x-agent": "planner-2"},
    key="sk-1",
    body={"model": "m"},
    messages=[Message("system", "Be brief."), Message("assistant", "old"), Message("user", "What is\nthe weather?")],
    tools=["get_weather"],
)


@pytest.mark.parametrize(
    ("fits", "others"),
    [
        ({"last": "weather"}, {"last": "^weather"}),
        ({"system": "brief"}, {"system": "weather"}),
        ({"any": "old"}, {"any": "new"}),
        ({"role": "user"}, {"role": "tool"}),
        ({"turn": 1}, {"turn": 0}),
        ({"tool": "get_weather"}, {"tool": "weather"}),
        ({"model": "m"}, {"model": "n"}),
        ({"path": "chat"}, {"path": "messages"}),
        ({"key": "sk-1"}, {"key": "sk-"}),
        ({"headers": {"X-Agent": "planner"}}, {"headers": {"X-Other": "."}}),
    ],
)
def test_a_rule_is_for_requests_that_fit_all_of_its_conditions(fits: dict[str, Any], others: dict[str, Any]) -> None:
    assert When(**fits).fits(REQUEST)
    assert not When(**others).fits(REQUEST)
    both: dict[str, Any] = {"last": "weather"} | others
    assert not When(**both).fits(REQUEST)


def test_a_text_streams_word_by_word_if_pieces_come_one_after_the_other() -> None:
    text = "Once upon  a\ntime"
    assert Answer(text).streamed == [text]
    assert Answer(text, between_tokens_s=0.1).streamed == ["Once ", "upon  ", "a\n", "time"]
    assert Answer().streamed == []
