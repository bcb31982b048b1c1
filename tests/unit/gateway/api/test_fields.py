"""Conversations of items and blocks, and the rule of fields that no type declares."""

from typing import ClassVar

import pytest

from gateway.api.field_rule import FieldRule, Part, Unread, begin_call
from gateway.api.fields import Conversation, Names, numbered, options_of
from gateway.request.violations import Violations
from gateway.types import ChatMessage
from quire.common.v1.common_pb2 import OutputOptions, SamplingParameters, StoppingParameters


class Inner(Part):
    known: int | None = None


class Outer(Part):
    unread: ClassVar[Unread] = Unread(frozenset({"label"}), {"n": (1,), "never": ()}, {"never": "; use known"})

    inner: Inner | None = None
    entries: list[Inner] | None = None


FIELDS = {"n": True, "never": 0, "x" * 200: 1, "label": 2, "inner": {"label": 1}, "entries": [{}, {"other": []}]}
REFUSED = {"n": "is not supported by this version", "never": "is not supported by this version; use known"}


def checked(fields, *, is_strict: bool = False) -> tuple[dict[str, str], str, list[tuple[str, int]]]:
    """The refused fields, the fields that the answer names as ignored, and the counted fields."""
    violations, ignored, counted = Violations(), begin_call(), list[tuple[str, int]]()
    FieldRule(is_strict, lambda name, count: counted.append((name, count))).check(
        violations, Outer.model_validate(fields), "chat"
    )
    return {each.field: each.description for each in violations.found}, ignored.names, counted


def test_fields_are_refused_by_the_table_and_others_are_ignored_and_named():
    assert checked(FIELDS) == (REFUSED, f"{'x' * 64}, inner.label, entries[].other", [("chat", 3)])


def test_strictly_every_other_field_is_refused_by_its_path():
    unknown = {
        "x" * 80: "is not a field of this request",
        "inner.label": "is not a known field",
        "entries[1].other": "is not a known field",
    }
    assert checked(FIELDS, is_strict=True) == (REFUSED | unknown, "", [])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"a\r\nset-cookie: b": 1}, "a%0D%0Aset-cookie%3A%20b"),
        ({"a, b": 1, "\u00e9\x00": 2}, "a%2C%20b, %C3%A9%00"),
        ({"entries": [{"a": 1}] * 1000}, "entries[].a"),
        ({f"f{number}": 1 for number in range(1000)}, ", ".join([*(f"f{number}" for number in range(16)), "..."])),
        ({"a": {"deep": [{"n": 1}]}, "b": None}, "a"),
    ],
)
def test_the_names_of_ignored_fields_are_few_short_and_fit_into_a_header(fields, named):
    refused, names, _ = checked(fields)
    assert (refused, names) == ({}, named)


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
    assert conversation.paths[1 + shift] == "previous"
    assert conversation.paths[2 + shift] == "input[0]"
    if instructions is not None:
        assert conversation.prompt[0] == ChatMessage("system", instructions)
        assert conversation.paths[0] == "instructions"

    with_system = Conversation(instructions=instructions)
    with_system.add_system("input[0]", ["Be kind.", "Be short."])
    with_system.add_system("input[1]", ["Now."])
    own = "Be kind.\nBe short.\n\nNow."
    assert [message.content for message in with_system.prompt] == [f"{instructions}\n\n{own}" if instructions else own]
    assert with_system.paths[0] == "input[0]"


class Parameters(Part):
    model: str | None = None
    cache_salt: str | None = None
    top_k: int | None = None
    stop: str | None = None


def test_only_declared_fields_are_parameters():
    undeclared = {"constraint": {"regex": "a"}, "beam_search": True, "n": 1, "logit_bias": {"1": 1}, "min_tokens": 3}
    body = Parameters.model_validate({"model": "", "top_k": -1, "stop": "a", **undeclared})
    found = options_of(body, None, "id", max_tokens=7)
    assert found.sampling == SamplingParameters(top_k=0)
    assert found.stopping == StoppingParameters(stop=["a"], max_tokens=7)
    assert found.output == OutputOptions()
    assert (found.model, found.request_id, found.as_written) == (None, "id", {})


def test_the_longest_known_beginning_of_a_field_names_it():
    places = numbered("tools", ["tools[1]", "tools[4]"])
    names = Names({"stopping.stop": "ends", "a.b": "c", **places}, {"a": "d", "a.b.whole": "e"})
    assert {field: names(field) for field in (
        "stopping.stop[2]", "chat.tools[1].parameters", "tools[2].name", "a.b[0].x", "a.x.y", "a.b.whole[3]",
        "sampling.top_p", "sampling.beam_search.early_stopping", "stopping.stopped", "messages",
    )} == {
        "stopping.stop[2]": "ends[2]",
        "chat.tools[1].parameters": "tools[4].parameters",
        "tools[2].name": "tools[2].name",
        "a.b[0].x": "c[0].x",
        "a.x.y": "d",
        "a.b.whole[3]": "e",
        "sampling.top_p": "top_p",
        "sampling.beam_search.early_stopping": "early_stopping",
        "stopping.stopped": "stopped",
        "messages": "messages",
    }  # fmt: skip
