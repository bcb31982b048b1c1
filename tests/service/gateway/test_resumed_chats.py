"""Durable chats with tools and reasoning are resumed through another gateway: the parts of the answer are the same."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from tokenizers import Tokenizer

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2 as pb
from quire.model_source import resolve_model
from tests.support.chat_models import write_chat_model
from tests.support.tokenizers import id_of
from tests.support.two_gateways import TwoGateways, two_gateways

TOKENIZER = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nI need it.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
SCRIPT = (*TOKENIZER.encode(ANSWER, add_special_tokens=False).ids, id_of(TOKENIZER, "</s>"))
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
async def two(tmp_path):
    model = str(write_chat_model(tmp_path / "model"))
    async with two_gateways(tmp_path, script=SCRIPT, model=model) as gateways:
        yield gateways


def chat() -> pb.ChatStreamRequest:
    return pb.ChatStreamRequest(
        messages=[pb.ChatMessage(role="user", content="Is it warm in Rome?")],
        tools=[pb.Tool(name="get_weather", parameters=json.dumps(SCHEMA))],
        stopping=common_pb2.StoppingParameters(max_tokens=300),
        request_id="story",
        durable=True,
    )


@dataclass
class Parts:
    """What came: the parts of the answer, how many tokens and characters they are, and the end."""

    reasoning: str = ""
    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    num_tokens: int = 0
    finished: Any = None
    usage: Any = None

    def add(self, response: Any) -> None:
        match response.WhichOneof("event"):
            case "chunk":
                self.reasoning += response.chunk.reasoning
                self.text += response.chunk.text
                self.num_tokens += len(response.chunk.token_ids)
                for call in response.chunk.tool_calls:
                    parts = self.calls.setdefault(call.index, ["", "", ""])
                    for place, part in enumerate((call.id, call.name, call.arguments)):
                        parts[place] += part
            case "finished":
                self.finished = response.finished
            case "completed":
                self.usage = response.completed.usage

    @property
    def num_characters(self) -> int:
        calls = sum(len(name) + len(arguments) for _, name, arguments in self.calls.values())
        return len(self.reasoning) + len(self.text) + calls


async def gathered(call, parts: Parts) -> Parts:
    async for response in call:
        parts.add(response)
    return parts


async def test_the_rest_of_a_chat_comes_in_the_same_parts(two: TwoGateways):
    responses = [response async for response in two.first.generation.ChatStream(chat())]
    whole = Parts()
    for response in responses:
        whole.add(response)
    assert (whole.reasoning, whole.text) == ("I need it.", "Let me see.")
    assert [call[1:] for call in whole.calls.values()] == [["get_weather", '{"city": "Rome"}']] * 2
    assert whole.finished.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
    assert 0 < whole.usage.reasoning_tokens < whole.usage.generated_tokens == len(SCRIPT)
    for num_had in range(0, len(responses) - 1, 9):
        parts = Parts()
        for response in responses[:num_had]:
            parts.add(response)
        resume = pb.ResumeStreamRequest(request_id="story")
        resume.offsets.add(sequence_index=0, offset=parts.num_tokens, num_characters=parts.num_characters)
        gateway = two.both[num_had % 2]
        assert await gathered(gateway.generation.ResumeStream(resume), parts) == whole
