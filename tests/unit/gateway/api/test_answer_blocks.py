"""Answers as rows of blocks."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gateway.api.answer_parts import BlockKind, Blocks
from gateway.text.formats.parser import Output, ToolCallDelta, joined


def run(pieces):
    blocks = Blocks()
    events = [(step, block.position, text) for piece in pieces for step, block, text in blocks.push(piece)]
    events += [(step, block.position, text) for step, block, text in blocks.end()]
    return blocks, events


@given(st.sets(st.integers(1, 8)))
def test_calls_stay_whole_when_a_slow_reader_gets_text_and_calls_in_one_piece(cuts):
    one_a_token = [
        Output(text="I look."),
        Output(tool_calls=(ToolCallDelta(0, "a", "look"),)),
        Output(tool_calls=(ToolCallDelta(0, arguments='{"x"'),)),
        Output(tool_calls=(ToolCallDelta(0, arguments=": 1}"),)),
        Output(text="And then"),
        Output(tool_calls=(ToolCallDelta(1, "b", "find"),)),
        Output(tool_calls=(ToolCallDelta(1, arguments="{}"),)),
        Output(reasoning="So."),
        Output(text="Done."),
    ]
    pieces = [joined(one_a_token[begin:end]) for begin, end in pairwise([0, *sorted(cuts), len(one_a_token)])]
    blocks, _ = run(pieces)
    calls = [(block.call_id, block.name, block.content) for block in blocks.all if block.kind is BlockKind.TOOL_CALL]
    assert calls == [("a", "look", '{"x": 1}'), ("b", "find", "{}")]
    assert "".join(block.content for block in blocks.all if block.kind is BlockKind.TEXT) == "I look.And thenDone."
