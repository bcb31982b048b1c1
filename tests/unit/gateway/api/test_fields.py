"""Conversations of items and blocks, and fields that are not supported."""

from typing import ClassVar

import pytest

from gateway.api.fields import Conversation, Part, check_fields
from gateway.request.violations import Violations
from gateway.types import ChatMessage


class Inner(Part):
    known: int | None = None


class Outer(Part):
    hints: ClassVar[frozenset[str]] = frozenset({"label"})
    harmless: ClassVar = {"n": (1,), "never": ()}

    inner: Inner | None = None
    entries: list[Inner] | None = None


def violations_of(fields) -> dict[str, str]:
    violations = Violations()
    check_fields(violations, Outer.model_validate(fields))
    return {each.field: each.description for each in violations.found}


def test_every_other_field_is_refused_by_its_path():
    fields = {"n": True, "never": 0, "x" * 200: 1, "inner": {"label": 1}, "entries": [{}, {"other": []}]}
    assert violations_of(fields) == {
        "n": "is not supported by this version",
        "never": "is not supported by this version",
        "x" * 80: "is not a field of this request",
        "inner.label": "is not a field that is known here",
        "entries[1].other": "is not a field that is known here",
    }


@pytest.mark.parametrize("joins", [False, True])
def test_an_answer_after_an_answer_is_another_message_unless_it_joins(joins):
    conversation = Conversation()
    conversation.add_answer("a", ["one"])
    conversation.add_answer("b", ["two"], joins=joins)
    contents = [message.content for message in conversation.messages]
    assert contents == (["one\ntwo"] if joins else ["one", "two"])
    assert conversation.ends_with_answer


@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_instructions_stand_before_all_messages_and_join_a_system_message(instructions):
    earlier = [ChatMessage("user", "a"), ChatMessage("assistant", "b")]
    conversation = Conversation(earlier, "previous", instructions)
    conversation.add("input[0]", "user", ["c"])
    assert len(conversation.messages) == 3
    shift = 0 if instructions is None else 1
    assert conversation.path_of(f"messages[{1 + shift}].content") == "previous"
    assert conversation.path_of(f"messages[{2 + shift}].content") == "input[0]"
    if instructions is not None:
        assert conversation.prompt[0] == ChatMessage("system", instructions)
        assert conversation.path_of("messages[0].content") == "instructions"

    with_system = Conversation(instructions=instructions)
    with_system.add_system("input[0]", ["Be kind.", "Be short."])
    with_system.add_system("input[1]", ["Now."])
    own = "Be kind.\nBe short.\n\nNow."
    assert [message.content for message in with_system.prompt] == [f"{instructions}\n\n{own}" if instructions else own]
    assert with_system.path_of("messages[0].content") == "input[0]"
