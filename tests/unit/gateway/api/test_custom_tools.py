"""Custom tools: their form for the model, and their inputs as they arrive."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.custom_tools import CustomDefinition, InputPieces, custom_call, custom_input, custom_tool


def read_in_pieces(arguments: str, size: int) -> str:
    pieces = InputPieces()
    read = "".join(pieces.push(arguments[begin : begin + size]) for begin in range(0, len(arguments), size))
    return read + pieces.rest


@given(text=st.text(), size=st.integers(1, 9), ensure_ascii=st.booleans())
def test_an_input_is_the_same_in_pieces_of_any_size(text, size, ensure_ascii):
    arguments = json.dumps({"input": text}, ensure_ascii=ensure_ascii)
    assert read_in_pieces(arguments, size) == custom_input(arguments) == text
    assert custom_input(custom_call("c", "f", text).arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("", ""),
        ('{"input": "ls \\ud83d', "ls "),
        ('{ "input" :"a\\nb', "a\nb"),
        ('{"command": "ls"}', '{"command": "ls"}'),
        ("ls -l", "ls -l"),
    ],
)
def test_an_input_may_be_cut_off_or_something_else(arguments, text):
    assert read_in_pieces(arguments, 3) == text


def test_a_regular_expression_is_a_pattern_and_a_lark_grammar_is_told():
    regex = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    tool = custom_tool(CustomDefinition.model_validate({"name": "f", "format": regex}))
    assert json.loads(tool.parameters)["properties"]["input"] == {"type": "string", "pattern": "^(?:a|b)$"}
    lark = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}
    tool = custom_tool(CustomDefinition.model_validate({"name": "f", "description": "Runs.", "format": lark}))
    assert tool.description == "Runs.\n\nThe input must match this Lark grammar:\nstart: A"
