"""Responses as objects and as streams: text, reasoning and tool calls."""

import dataclasses
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api.answers import ErrorAnswer, as_json
from gateway.api.responses.read import ResponseBody
from gateway.api.responses.write import ResponseHead, ResponseShaper
from gateway.replicas.events import Chunk, Finished, FinishReason, GeneratedSequence, Usage
from gateway.text.formats.output import ToolCallDelta
from gateway.text.tokenizer import TokenTexts
from gateway.types import ChatMessage
from quire.common.v1.common_pb2 import SamplingParameters
from quire.gateway.v1.generation_pb2 import ToolCall
from tests.support.tokenizers import byte_level, wrapped

USAGE = Usage(prompt_tokens=5, generated_tokens=9, cached_tokens=2, reasoning_tokens=4)
CHUNKS = [
    Chunk(0, 0, [1], "", reasoning="Let me "),
    Chunk(0, 1, [2], "I look.", reasoning="see."),
    Chunk(0, 2, [3], "", tool_calls=(ToolCallDelta(0, "call_a", "look", '{"x"'),)),
    Chunk(0, 3, [4], "", tool_calls=(ToolCallDelta(0, arguments=": 1}"), ToolCallDelta(1, "call_b", "find", "{}"))),
]
SEQUENCE = GeneratedSequence(
    [1, 2, 3, 4],
    "I look.",
    (),
    Finished(0, 4, FinishReason.TOOL_CALLS),
    "Let me see.",
    (ToolCall(id="call_a", name="look", arguments='{"x": 1}'), ToolCall(id="call_b", name="find", arguments="{}")),
)


class Kept:
    """What a shaper hands to the store."""

    def __init__(self) -> None:
        self.response = self.answer = None

    def __call__(self, response, answer) -> None:
        self.response, self.answer = response, answer


def make_shaper(kept=None, **fields) -> ResponseShaper:
    request = SimpleNamespace(sampling=SamplingParameters(temperature=0.5, top_p=1.0))
    body = ResponseBody.model_validate({"input": "hello"} | fields)
    head = ResponseHead("resp_1", 100, "tiny")
    texts = TokenTexts(wrapped(byte_level()))
    return ResponseShaper(head, body, cast(Any, SimpleNamespace(request=request)), texts, kept or Kept())


def stream(shaper, chunks, reason=FinishReason.TOOL_CALLS) -> list[dict]:
    events = [*shaper.begin()]
    for event in (*chunks, Finished(0, 4, reason)):
        events += shaper.event(0, event)
    return json.loads(as_json({"events": [*events, *shaper.end([USAGE])]}))["events"]


def test_reasoning_text_and_calls_are_items_of_their_own():
    kept = Kept()
    response = json.loads(as_json(make_shaper(kept).whole([([SEQUENCE], USAGE)])))
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, look, find = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert (message["role"], message["content"][0]["text"]) == ("assistant", "I look.")
    assert (look["call_id"], look["name"], look["arguments"]) == ("call_a", "look", '{"x": 1}')
    assert (find["call_id"], find["name"], find["arguments"]) == ("call_b", "find", "{}")
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["status"] == "completed"
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 2
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 4
    assert kept.response["id"] == "resp_1"
    assert kept.answer == ChatMessage("assistant", "I look.", tool_calls=SEQUENCE.tool_calls, reasoning="Let me see.")


def test_a_stream_says_what_the_whole_response_says():
    kept = Kept()
    events = stream(make_shaper(kept), CHUNKS)
    whole = json.loads(as_json(make_shaper().whole([([SEQUENCE], USAGE)])))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["type"], events[1]["type"]) == ("response.created", "response.in_progress")
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == whole["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert kept.answer == ChatMessage("assistant", "I look.", tool_calls=SEQUENCE.tool_calls, reasoning="Let me see.")


def test_each_item_of_a_stream_has_its_own_events_in_order():
    events = stream(make_shaper(), CHUNKS)[2:-1]
    by_item = [[event["type"].removeprefix("response.") for event in events if event["output_index"] == place]
               for place in range(4)]  # fmt: skip
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    assert by_item[0] == [each.format("reasoning_text") for each in (*text[:3], *text[2:])]
    assert by_item[1] == [each.format("output_text") for each in text]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    assert by_item[3] == [each.format("function_call_arguments") for each in call]
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" for item in added)
    assert (added[2]["name"], added[2]["arguments"]) == ("look", "")
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert deltas == ['{"x"', ": 1}", "{}"]


@pytest.mark.parametrize("streams", [True, False])
def test_only_the_last_item_of_a_response_that_is_cut_is_incomplete(streams):
    shaper = make_shaper()
    if streams:
        *_, last = stream(shaper, CHUNKS, FinishReason.LENGTH)
        assert last["type"] == "response.incomplete"
        response = last["response"]
    else:
        cut = dataclasses.replace(SEQUENCE, finished=Finished(0, 4, FinishReason.LENGTH))
        response = json.loads(as_json(shaper.whole([([cut], USAGE)])))
    assert [item["status"] for item in response["output"]] == ["completed"] * 3 + ["incomplete"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_error_is_the_next_event():
    shaper = make_shaper()
    list(shaper.begin())
    event = shaper.error_event(ErrorAnswer(500, "it failed", "step_refused"))
    assert (event["type"], event["sequence_number"], event["code"]) == ("error", 2, "step_refused")
    assert event["error"]["message"] == "it failed"
