"""Messages as objects. Their streams are tested over HTTP."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.api.anthropic.front import MessageShaper
from gateway.replicas.events import Finished, FinishReason, GeneratedSequence, Usage
from quire.gateway.v1.generation_pb2 import ToolCall


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", {}),
        ('{"x": [1, 2', {"x": [1, 2]}),
        ("[1]", {"arguments": "[1]"}),
        ("no", {"arguments": "no"}),
        # The first is JSON, whose value no answer in JSON can have.
        ('{"x": 1e400}', {"arguments": '{"x": 1e400}'}),
        ('{"x": NaN}', {"arguments": '{"x": NaN}'}),
    ],
)
def test_arguments_that_are_no_object_are_kept_as_far_as_they_go(arguments, shown):
    live: Any = SimpleNamespace(request=SimpleNamespace(prompt_token_ids=[0] * 5))
    calls = (ToolCall(id="call_a", name="look", arguments=arguments),)
    sequence = GeneratedSequence([1, 2, 3, 4], "", (), Finished(0, 4, FinishReason.LENGTH), "Let me see.", calls)
    message = MessageShaper("msg_1", "tiny", live, shows_thinking=True).whole([([sequence], Usage(5, 9, 3))])
    last = message["content"][-1]
    assert last["type"] == "tool_use"
    assert last["input"] == shown
    assert message["stop_reason"] == "max_tokens"
    usage = message["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (2, 3, 9)
