"""Fields that constrain an answer: the constraint that each becomes, and the refused ones."""

import json
from typing import Any

import pytest

from gateway.api.generation_fields import CompletionBody, completion_options, names_of
from gateway.api.openai.schemas import ChatBody, chat_names, chat_options
from gateway.types import ChatPrompt
from quire.common.v1.common_pb2 import AnyJsonObject, Choice, Constraint, StructuralTag, StructuralTags
from quire.rpc.errors import InvalidArgument
from tests.support.openai_bodies import parse

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f="],
}
TAGGED = Constraint(
    structural_tags=StructuralTags(
        tags=[StructuralTag(begin="<f=", lark=f'start: "a>" arguments\narguments: %json {TEXT}\n', end="</f>")]
    )
)
CASES: list[tuple[dict[str, Any], Constraint, str]] = [
    ({"response_format": {"type": "json_object"}}, Constraint(json_object=AnyJsonObject()), "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
        Constraint(json_schema=TEXT),
        "response_format.json_schema.schema",
    ),
    ({"response_format": TAGS}, TAGGED, "response_format"),
    ({"structured_outputs": {"json": SCHEMA}}, Constraint(json_schema=TEXT), "structured_outputs.json"),
    ({"structured_outputs": {"json": "{}"}}, Constraint(json_schema="{}"), "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+"}}, Constraint(regex="a+"), "structured_outputs.regex"),
    (
        {"structured_outputs": {"choice": ["a", "b"]}},
        Constraint(choice=Choice(texts=["a", "b"])),
        "structured_outputs.choice",
    ),
    ({"structured_outputs": {"grammar": "start: /a/"}}, Constraint(lark="start: /a/"), "structured_outputs.grammar"),
    (
        {"structured_outputs": {"json_object": True}},
        Constraint(json_object=AnyJsonObject()),
        "structured_outputs.json_object",
    ),
    ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, TAGGED, "structured_outputs.structural_tag"),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, Constraint(json_schema=TEXT), "guided_json"),
    ({"guided_regex": "a+"}, Constraint(regex="a+"), "guided_regex"),
    ({"guided_choice": ["a"]}, Constraint(choice=Choice(texts=["a"])), "guided_choice"),
    ({"guided_grammar": "start: /a/"}, Constraint(lark="start: /a/"), "guided_grammar"),
    ({"structural_tag": json.dumps(TAGS)}, TAGGED, "structural_tag"),
    # SGLang's and llama.cpp's, whose clients send empty ones for none.
    ({"regex": "a+", "ebnf": ""}, Constraint(regex="a+"), "regex"),
    ({"ebnf": 'root ::= "a"'}, Constraint(lark='root ::= "a"'), "ebnf"),
    ({"grammar": 'root ::= "a"', "regex": "", "json_schema": ""}, Constraint(lark='root ::= "a"'), "grammar"),
    ({"json_schema": SCHEMA, "grammar": ""}, Constraint(json_schema=TEXT), "json_schema"),
    ({"json_schema": TEXT}, Constraint(json_schema=TEXT), "json_schema"),
    # Formats of llama.cpp and Together, Together, Fireworks, and TGI.
    *(
        (
            {"response_format": {"type": "json_object", name: SCHEMA}},
            Constraint(json_schema=TEXT),
            f"response_format.{name}",
        )
        for name in ("schema", "value")
    ),
    (
        {"response_format": {"type": "json_object", "schema": {}}},
        Constraint(json_object=AnyJsonObject()),
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        Constraint(json_schema=TEXT),
        "response_format.schema",
    ),
    ({"response_format": {"type": "regex", "pattern": "a+"}}, Constraint(regex="a+"), "response_format.pattern"),
    ({"response_format": {"type": "regex", "value": "a+"}}, Constraint(regex="a+"), "response_format.value"),
    ({"response_format": {"type": "json", "value": SCHEMA}}, Constraint(json_schema=TEXT), "response_format.value"),
    (
        {"response_format": {"type": "grammar", "grammar": "start: /a/"}},
        Constraint(lark="start: /a/"),
        "response_format.grammar",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Constraint(json_schema=TEXT, no_white_space=True),
        "structured_outputs.json",
    ),
    (
        {"guided_json": SCHEMA, "guided_decoding_disable_any_whitespace": True},
        Constraint(json_schema=TEXT, no_white_space=True),
        "guided_json",
    ),
]


@pytest.mark.parametrize(("fields", "constraint", "path"), CASES)
def test_every_field_becomes_a_constraint_and_is_named_in_errors(fields, constraint, path):
    completion = parse(CompletionBody, {"prompt": "a"} | fields)
    assert completion_options(completion, None, "id").sampling.constraint == constraint
    assert names_of(completion)("sampling.constraint.json_schema") == path
    chat = parse(ChatBody, {"messages": HELLO} | fields)
    options = chat_options(chat, "id")
    assert isinstance(options.prompt, ChatPrompt)
    # The text before a chat's content is free, so the constraint is no parameter of sampling.
    assert options.prompt.response_format == constraint
    assert not options.sampling.HasField("constraint")
    assert chat_names(chat)("response_format.regex") == path


def test_text_is_no_constraint():
    for fields in ({}, {"response_format": {"type": "text"}}, {"guided_json": None}):
        options = completion_options(parse(CompletionBody, {"prompt": "a"} | fields), None, "id")
        assert not options.sampling.HasField("constraint")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<"]}}, "response_format.structures"),
        ({"response_format": TAGS | {"triggers": ["{"]}}, "response_format.structures[0].begin"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.format"),
        ({"response_format": {"type": "json_object", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "schema": {"type": "object"}}}, "response_format.schema"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.pattern"),
        ({"response_format": {"type": "regex", "value": {"a": 1}}}, "response_format.value"),
        ({"response_format": {"type": "json"}}, "response_format.value"),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar"),
        ({"regex": "a", "json_schema": {"type": "object"}}, "json_schema"),
        (
            {"ebnf": 'root ::= "a"', "guided_decoding_disable_any_whitespace": True},
            "guided_decoding_disable_any_whitespace",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": '{"type": "text"}'}}, "structured_outputs.structural_tag.type"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"structural_tag": 7}, "structural_tag"),
        # Compared with each other, these would take minutes.
        ({"structural_tag": json.dumps(TAGS | {"structures": TAGS["structures"] * 257})}, "structural_tag.structures"),
        ({"structural_tag": json.dumps(TAGS | {"triggers": ["<"] * 257})}, "structural_tag.triggers"),
    ],
)
def test_what_is_wrong_is_named(fields, path):
    for kind, head in ((CompletionBody, {"prompt": "a"}), (ChatBody, {"messages": HELLO})):
        with pytest.raises(InvalidArgument) as caught:
            parse(kind, head | fields)
        assert caught.value.violations[0].field == path


def test_values_that_change_nothing_are_fine():
    outputs = {"regex": "a", "disable_fallback": True, "disable_any_whitespace": False, "whitespace_pattern": None}
    assert parse(CompletionBody, {"prompt": "a", "structured_outputs": outputs}).structured_outputs is not None
