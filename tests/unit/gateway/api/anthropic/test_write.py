"""Messages as objects and as streams: text, thinking and tool calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.anthropic.write import MessageShaper
from gateway.replicas.events import Finished, FinishReason, GeneratedSequence, Usage
from quire.gateway.v1.generation_pb2 import ToolCall

USAGE = Usage(prompt_tokens=5, generated_tokens=9, cached_tokens=2, reasoning_tokens=4)
FINISHED = Finished(0, 4, FinishReason.TOOL_CALLS)


def make_shaper(*, shows_thinking: bool = True) -> MessageShaper:
    live: Any = SimpleNamespace(request=SimpleNamespace(prompt_token_ids=[0] * 5))
    return MessageShaper("msg_1", "tiny", live, shows_thinking=shows_thinking)


def whole(arguments='{"x": 1}', finished=FINISHED, **fields) -> dict:
    calls = (ToolCall(id="call_a", name="look", arguments=arguments),)
    sequence = GeneratedSequence([1, 2, 3, 4], "I look.", (), finished, "Let me see.", calls)
    return dict(make_shaper(**fields).whole([([sequence], USAGE)]))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [("", {}), ('{"x": [1, 2', {"x": [1, 2]}), ("[1]", {"arguments": "[1]"}), ("no", {"arguments": "no"})],
)
def test_arguments_that_are_no_object_are_kept_as_far_as_they_go(arguments, shown):
    message = whole(arguments, Finished(0, 4, FinishReason.LENGTH))
    assert message["content"][-1]["input"] == shown
    assert message["stop_reason"] == "max_tokens"
