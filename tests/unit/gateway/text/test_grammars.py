"""Text of a model of random weights under the constraints of calls is read as calls that fit their schemas."""

import contextlib
import json
import random
from dataclasses import replace

import jsonschema
import pytest
import tokenizers

from gateway.text.formats.answer import TOOL_FORMATS, AnswerFormat
from gateway.text.formats.grammars import (
    CallGrammar,
    ModelText,
    calls_or_answer,
    check_arguments,
    constrained_calls,
    format_of_forced_calls,
)
from gateway.text.formats.notations import text_parameters
from gateway.text.formats.parser import OfferedTool, joined
from gateway.text.formats.rendered import ID, CallShape, Layout, written_calls
from gateway.text.formats.shapes import SHAPES
from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import ConstraintError
from quire.constraints.matcher import Template, Vocabulary
from tests.support.constraints import accepts_tokens, make_vocabulary, spelled, vocabulary, write
from tests.support.tiers import is_third_tier, parametrize_in_turn, parametrize_once
from tests.support.tokenizers import byte_level

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "mode": {"enum": ["now", "later"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
# A schema whose references lead to itself.
TREE = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["name", "next"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "walk": TREE, "now": EMPTY}
CALLS = [CallGrammar(name, json.dumps(schema)) for name, schema in SCHEMAS.items()]
TOOLS = tuple(OfferedTool(call.name, text_parameters(call.schema)) for call in CALLS)
MARKS = (
    "[TOOL_CALLS]",
    "[ARGS]",
    "<tool_call>",
    "</tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁sep｜>",
    "<|message|>",
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<escape>",
    "</arg_value>",
    "<|tool_call|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
)
FORMATS = [(name, None) for name in sorted(TOOL_FORMATS)] + [
    ("mistral", replace(SHAPES["mistral"], section_open="[TOOL_CALLS] [")),
    ("mistral", CallShape(Layout.NAMED, call_open="[TOOL_CALLS]", name_close="[ARGS]")),
    ("mistral", CallShape(Layout.NAMED, call_open="[TOOL_CALLS]", name_close=f"[CALL_ID]{ID}[ARGS]")),
]


def with_marks() -> Vocabulary:
    """A vocabulary in which marks of formats are special tokens, as they are in the models' own."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_special_tokens(list(MARKS))
    return make_vocabulary(tokenizer)


VOCABULARIES = [vocabulary("byte level"), with_marks()]
each_vocabulary = parametrize_once("held", VOCABULARIES, ids=["marks are text", "marks are tokens"])


def written(constraint: Constraint | None, held: Vocabulary, seed: int, begin: str = "") -> tuple[str, bool]:
    """A text that begins with `begin` and continues at random, and whether it ended by itself."""
    assert constraint is not None
    given = spelled(begin, held)
    choices = random.Random(seed)

    def choose(possible):
        if given:
            assert given[0] in possible
            return given.pop(0)
        return int(choices.choice(possible))

    template = Template.of(constraint, held)
    token_ids, has_ended = write(template, choose, max_tokens=500)
    return b"".join(held.token_bytes[token_id] for token_id in token_ids).decode(errors="replace"), has_ended


def read(tool_format, text):
    parser = AnswerFormat(tool_format=tool_format, tools=TOOLS).parser(str)
    return joined([parser.push(text), parser.finish()])


def assert_fitting(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@parametrize_in_turn("form, held", FORMATS, [(each,) for each in VOCABULARIES])
def test_forced_calls_are_read_and_fit(form, held):
    name, shape = form
    num_complete = 0
    for seed in range(6 if is_third_tier() else 4):
        is_single = bool(seed % 2)
        model = ModelText(shape, held.special_tokens)
        constraint = constrained_calls(name, CALLS, model, is_forced=True, is_single=is_single)
        text, has_ended = written(constraint, held, seed)
        output = read(format_of_forced_calls(name), text)
        assert not (has_ended and output.text.strip()), text
        complete = output.tool_calls if has_ended else output.tool_calls[:-1]
        assert_fitting(complete)
        if has_ended:
            num_complete += 1
            assert len(complete) == 1 if is_single else complete
    assert num_complete


@each_vocabulary
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"json_list"}))
@pytest.mark.parametrize("is_forced", [True, False], ids=["forced", "auto"])
def test_several_calls_are_accepted_as_they_are_written_and_read_back(name, is_forced, held):
    weather = {"city": "Oslo", "unit": "C", "days": 3}
    written = [
        ("get_weather", json.dumps(weather), "a1"),
        ("now", "{}", "a2"),
        ("get_weather", json.dumps(weather), "a3"),
    ]
    text = written_calls(SHAPES[name], written[: 3 if SHAPES[name].is_parallel else 1])
    output = read(name, text)
    assert [(each.name, json.loads(each.arguments)) for each in output.tool_calls] == [
        (called, json.loads(arguments)) for called, arguments, _ in written[: len(output.tool_calls)]
    ]
    assert (output.text.strip(), len(output.tool_calls)) == ("", 3 if SHAPES[name].is_parallel else 1)
    if is_forced and format_of_forced_calls(name) == "json_list":
        return
    model = ModelText(None, held.special_tokens)
    constraint = constrained_calls(name, CALLS, model, is_forced=is_forced, is_single=False)
    assert constraint is not None
    template = Template.of(constraint, held)
    assert accepts_tokens(template, spelled(text, held))
    assert not accepts_tokens(template, spelled(text.replace("Oslo", "longer than 8"), held))


def test_constants_are_accepted_as_the_template_writes_them():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"anyOf": [{"type": "null"}, {"enum": [1]}]}},
    }
    calls = [CallGrammar("now", json.dumps(schema))]
    usual = SHAPES["glm45"].tags
    assert usual is not None
    tags = replace(usual, constants=("True", "None"))
    for shape, spellings in (
        (SHAPES["glm45"], {"true": True}),
        (replace(SHAPES["glm45"], tags=tags), {"True": True, "true": True}),
    ):
        held = vocabulary("byte level")
        constraint = constrained_calls(
            "glm45", calls, ModelText(shape, held.special_tokens), is_forced=True, is_single=True
        )
        assert constraint is not None
        for spelling in ("true", "True"):
            text = f"<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>{spelling}</arg_value>\n</tool_call>"
            assert accepts_tokens(Template.of(constraint, held), spelled(text, held)) == (spelling in spellings)
            (call,) = read("glm45", text).tool_calls
            assert json.loads(call.arguments) == {"a": True}


# The free beginning of a call of the tool, before the constraint holds.
BEGINNINGS = {
    "hermes": "I look. <tool_call>\n",
    "llama3_json": '{"name": "now", "parameters": ',
    "mistral": "I look.[TOOL_CALLS]",
    "deepseek_v3": "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
    "deepseek_v31": "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>",
    "qwen3_coder": "I look.\n<tool_call>\n<function=get_weather>\n",
    "openai": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
    "glm45": "I look.\n<tool_call>",
    "gemma4": "I look.<|tool_call>",
    "functiongemma": "<start_function_call>call:get_weather{",
    "pythonic": "[get_weather(",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:",
    "granite": "I look.<|tool_call|>",
    "phi4_mini_json": "I look. functools",
}


@each_vocabulary
@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_call_that_has_begun_fits(name, held):
    constraint = constrained_calls(name, CALLS, ModelText(None, held.special_tokens), is_forced=False, is_single=True)
    num_complete = 0
    for seed in range(6):
        text, has_ended = written(constraint, held, seed, BEGINNINGS[name])
        output = read(name, text)
        assert output.tool_calls or not has_ended, text
        if has_ended:
            num_complete += 1
            assert_fitting(output.tool_calls)
    assert num_complete


# Keywords that schemas may have in notations other than JSON.
VALUES = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 5}, "minItems": 1, "maxItems": 3},
        "b": {"type": ["string", "null"], "minLength": 1, "maxLength": 3},
        "c": {"type": "object", "properties": {"x y": {"type": "boolean"}}, "required": ["x y"]},
        "d": {"enum": ["it's", 'say "a"', 2, None, True]},
        "e": {"anyOf": [{"type": "number", "maximum": 1, "minimum": 0}, {"const": "none"}]},
        "f": {"type": "object", "additionalProperties": {"type": "null"}},
        "g": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/g"}},
        "h": {"maxLength": 2, "maxItems": 1, "type": ["string", "boolean", "array"], "items": {"type": "null"}},
    },
    "required": ["c", "g"],
    "$defs": {"g": {"type": "array", "items": {"$ref": "#/$defs/g"}, "maxItems": 1}},
}


@each_vocabulary
@pytest.mark.parametrize("name", ["gemma4", "functiongemma", "pythonic"])
def test_values_in_other_notations_fit_their_schemas(name, held):
    calls, seen = [CallGrammar("get_weather", json.dumps(VALUES))], set[str]()
    constraint = constrained_calls(name, calls, ModelText(None, held.special_tokens), is_forced=False, is_single=True)
    for seed in range(100):
        text, has_ended = written(constraint, held, seed, BEGINNINGS[name])
        if seen == VALUES["properties"].keys():
            break
        if has_ended:
            (call,) = read(name, text).tool_calls
            arguments = json.loads(call.arguments)
            jsonschema.validate(arguments, VALUES)
            seen |= arguments.keys()
    assert seen == VALUES["properties"].keys()


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ({"a": {"type": "string", "format": "date"}}, 'uses "format"'),
        ({"a": {"type": "string", "pattern": "a^b"}}, "pattern"),
        ({"a": {"allOf": [{"type": "string"}, {"maxLength": 1}]}}, 'uses "allOf"'),
        ({"a": {"enum": [[1]]}}, "an enum of lists"),
        ({"a": {"type": "array", "prefixItems": [{"type": "null"}]}}, 'uses "prefixItems"'),
    ],
)
def test_what_only_json_can_enforce_is_named(properties, problem):
    schema = json.dumps({"type": "object", "properties": properties})
    is_text = properties["a"].get("type") == "string"
    for name in ("gemma4", "functiongemma", "pythonic", *(("qwen3_coder", "glm45") if is_text else ())):
        with pytest.raises(ConstraintError, match=problem):
            check_arguments(name, schema)
    for name in ("hermes", None, *(() if is_text else ("qwen3_coder", "glm45"))):
        check_arguments(name, schema)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"properties": {"a": {"type": "string", "enum": ["a", "b"], "pattern": "^a"}}}, 'uses "pattern"'),
        ({"properties": {"a": {"type": "string", "const": 5}}}, "nothing matches"),
        ({"properties": {"a": {"type": "string"}}, "required": ["b"]}, "required properties that it does not name"),
        ({"required": ["b"]}, "required properties that it does not name"),
        ({"patternProperties": {"^a": {"type": "integer"}}}, 'uses "patternProperties"'),
        ({"properties": {"a": {"type": "string"}}, "minProperties": 1}, 'uses "minProperties"'),
    ],
)
def test_what_a_notation_would_drop_is_refused_by_name(schema, problem):
    for name in ("gemma4", "functiongemma", "pythonic", "qwen3_coder", "glm45"):
        with pytest.raises(ConstraintError, match=problem):
            check_arguments(name, json.dumps({"type": "object"} | schema))


def test_alternatives_that_may_match_together_are_refused_in_other_notations():
    both = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    for name in ("gemma4", "functiongemma", "pythonic"):
        with pytest.raises(ConstraintError, match='uses "oneOf"'):
            check_arguments(name, json.dumps({"type": "object", "properties": {"a": both}}))
        check_arguments(name, json.dumps({"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "null"}]}}}))
        listed = {"type": "array", "items": [{"type": "integer"}]}
        with pytest.raises(ConstraintError, match="a list of items"):
            check_arguments(name, json.dumps({"type": "object", "properties": {"a": listed}}))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "gemma4", "pythonic"])
def test_a_schema_that_each_parameter_would_repeat_has_no_grammar(name):
    long = {"enum": [f"{number:a>2000}" for number in range(50)]}
    same = {f"a{number}": {"$ref": "#/$defs/long"} for number in range(100)}
    check_arguments(name, json.dumps({"type": "object", "properties": same, "$defs": {"long": {"enum": ["b"]}}}))
    each = same if name in ("qwen3_coder", "glm45") else {name: {"anyOf": [long]} for name in same}
    schema = json.dumps({"type": "object", "properties": each, "$defs": {"long": long}})
    with pytest.raises(ConstraintError, match="takes more than 1,048,576 characters as a grammar"):
        check_arguments(name, schema)


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"$ref": "#/$defs/none"}}},
        {"properties": {"a": {"type": "string"}}, "required": 5},
        {"properties": {"a": {"type": {"b": 1}}}},
        {"properties": {"a": {"type": "array", "minItems": "x"}}},
        {"properties": {"a": {"type": "string", "pattern": 5}}},
        {"properties": {"a": {"enum": 5}}},
    ],
)
def test_a_schema_that_is_none_is_refused_and_no_failure(parameters):
    schema = json.dumps({"type": "object"} | parameters)
    for name in ("gemma4", "pythonic", "qwen3_coder", "glm45"):
        with contextlib.suppress(ConstraintError):
            check_arguments(name, schema)
    with pytest.raises(ConstraintError):
        check_arguments("gemma4", schema)


@pytest.mark.parametrize("name", [name for name in BEGINNINGS if name != "openai"])
@each_vocabulary
def test_an_answer_has_the_format_or_calls(name, held):
    wanted = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"]} | {
        "additionalProperties": False
    }
    answer = Constraint(json_schema=json.dumps(wanted))
    model = ModelText(None, held.special_tokens)
    constraint = calls_or_answer(name, CALLS, model, answer, is_single=False)
    seen = set()
    for seed in range(12):
        text, has_ended = written(constraint, held, seed)
        output = read(name, text)
        if output.tool_calls:
            seen.add("calls")
            assert not (has_ended and output.text.strip()), text
            assert_fitting(output.tool_calls if has_ended else output.tool_calls[:-1])
        elif has_ended:
            seen.add("answer")
            jsonschema.validate(json.loads(output.text), wanted)
    assert seen == {"calls", "answer"}


def test_what_cannot_stand_beside_calls_has_no_constraint():
    for answer in (Constraint(regex="a"), Constraint(lark='start: "a"')):
        assert calls_or_answer("hermes", CALLS, ModelText(), answer, is_single=True) is None
    choice = Constraint()
    choice.choice.texts.extend(["red", "green"])
    held = vocabulary("byte level")
    constraint = calls_or_answer("hermes", CALLS, ModelText(), choice, is_single=True)
    assert written(constraint, held, 1, "re") == ("red", True)


@each_vocabulary
def test_texts_between_tags_have_their_length_and_their_pattern(held):
    parameters = {"a": {"type": "string", "maxLength": 2}, "b": {"type": "string", "pattern": "^[ab]{2}$"}}
    schema = {"type": "object", "properties": parameters | {"c": {"const": "x"}}, "required": ["a", "b", "c"]}
    calls, model = [CallGrammar("now", json.dumps(schema))], ModelText(None, held.special_tokens)
    for name in ("glm45", "qwen3_coder"):
        constraint = constrained_calls(name, calls, model, is_forced=True, is_single=True)
        text, has_ended = written(constraint, held, 1)
        parser = AnswerFormat(name, tools=(OfferedTool("now", text_parameters(calls[0].schema)),)).parser(str)
        (call,) = joined([parser.push(text), parser.finish()]).tool_calls
        assert has_ended
        jsonschema.validate(json.loads(call.arguments), schema)


def test_parameters_that_are_texts():
    schema = {
        "properties": {
            "a": {"type": "string"},
            "b": {"enum": ["x", "y"]},
            "c": {"const": "x"},
            "d": {"enum": ["x", 1]},
            "e": {"type": ["string", "null"]},
            "f": {"type": "integer"},
            "g": True,
        }
    }
    assert text_parameters(json.dumps(schema)) == {"a", "b", "c"}
    assert text_parameters("") == text_parameters("[") == text_parameters('{"properties": 1}') == frozenset()


def test_a_format_that_is_not_known_leaves_begun_calls_free():
    assert constrained_calls(None, CALLS, ModelText(), is_forced=False, is_single=True) is None


@each_vocabulary
@pytest.mark.parametrize(
    ("name", "begun"),
    [
        ("qwen3_coder", "<tool_call>\n<function=now>\n<parameter=at>\nit\n</parameter>\n<parameter=n>\n5\n"),
        (
            "glm45",
            "<tool_call>now\n<arg_key>at</arg_key>\n<arg_value>it</arg_value>\n<arg_key>n</arg_key>\n<arg_value>5",
        ),
    ],
)
def test_calls_between_tags_have_any_arguments_where_no_schema_is_enforced(name, begun, held):
    constraint = constrained_calls(
        name, [CallGrammar("now")], ModelText(None, held.special_tokens), is_forced=False, is_single=True
    )
    text, _ = written(constraint, held, 1, begun)
    (call,) = read(name, text).tool_calls
    assert '{"at": "it", "n": ' in call.arguments
