"""Messages as objects and as streams: text, thinking and tool calls."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.anthropic.write import MessageShaper
from gateway.replicas.events import Chunk, Finished, FinishReason, GeneratedSequence, Usage
from gateway.text.formats.output import ToolCallDelta
from quire.gateway.v1.generation_pb2 import ToolCall

USAGE = Usage(prompt_tokens=5, generated_tokens=9, cached_tokens=2, reasoning_tokens=4)
FINISHED = Finished(0, 4, FinishReason.TOOL_CALLS)
CHUNKS = [
    Chunk(0, 0, [1], "", reasoning="Let me "),
    Chunk(0, 1, [2], "I look.", reasoning="see."),
    Chunk(0, 2, [3], "", tool_calls=(ToolCallDelta(0, "call_a", "look", '{"x"'),)),
    Chunk(0, 3, [4], "", tool_calls=(ToolCallDelta(0, arguments=": 1}"),)),
]


def make_shaper(*, shows_thinking: bool = True) -> MessageShaper:
    live: Any = SimpleNamespace(request=SimpleNamespace(prompt_token_ids=[0] * 5))
    return MessageShaper("msg_1", "tiny", live, shows_thinking=shows_thinking)


def whole(arguments='{"x": 1}', finished=FINISHED, **fields) -> dict:
    calls = (ToolCall(id="call_a", name="look", arguments=arguments),)
    sequence = GeneratedSequence([1, 2, 3, 4], "I look.", (), finished, "Let me see.", calls)
    return dict(make_shaper(**fields).whole([([sequence], USAGE)]))


def stream(**fields) -> list[dict]:
    shaper = make_shaper(**fields)
    events = [*shaper.begin()]
    for event in (*CHUNKS, FINISHED):
        events += shaper.event(0, event)
    return [dict(event) for event in (*events, *shaper.end([USAGE]))]


def gathered(events) -> list[dict]:
    """The blocks of a stream, as clients gather them."""
    blocks: list[dict] = []
    texts = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"partial_json": ""})
            case "content_block_delta":
                name = texts[event["delta"]["type"]]
                blocks[event["index"]][name] += event["delta"][name]
    for block in blocks:
        arguments = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(arguments)
    return blocks


def test_thinking_text_and_calls_are_blocks_of_their_own():
    message = whole()
    assert message["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_a", "name": "look", "input": {"x": 1}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2, "output_tokens": 9,
        "output_tokens_details": {"thinking_tokens": 4},
    }  # fmt: skip


@pytest.mark.parametrize("shows_thinking", [True, False])
def test_a_stream_says_what_the_whole_message_says(shows_thinking):
    events, message = stream(shows_thinking=shows_thinking), whole(shows_thinking=shows_thinking)
    assert gathered(events) == message["content"]
    assert message["content"][0]["thinking"] == ("Let me see." if shows_thinking else "")
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": message["usage"],
    }
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", {}), ('{"x": [1, 2', {"x": [1, 2]}), ("[1]", {"arguments": "[1]"}), ("no", {"arguments": "no"})],
)
def test_arguments_that_are_no_object_are_kept_as_far_as_they_go(arguments, shown):
    message = whole(arguments, Finished(0, 4, FinishReason.LENGTH))
    assert message["content"][-1]["input"] == shown
    assert message["stop_reason"] == "max_tokens"
