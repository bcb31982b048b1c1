"""The entries of a message are counted in its bytes, as protobuf would parse them, before anything walks it."""

import json
from collections import Counter
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from gateway.request.body_memory import BodyMemory, message_memory
from gateway.request.counting import (
    MAX_NUMBERS,
    CountedMessage,
    EntryLimits,
    check_json,
    check_values,
    checking_json,
    num_values_in,
)
from quire.gateway.v1.generation_pb2 import (
    ChatRequest,
    DetokenizeRequest,
    GenerateRequest,
    HeldSequence,
    ResumeStreamRequest,
)
from quire.inference.open_inference_pb2 import ModelInferRequest
from quire.rpc.errors import InvalidArgument

LIMITS = EntryLimits(max_messages=8)


@dataclass(frozen=True, slots=True)
class _Exactly(EntryLimits):
    """The same maximum for every list and map."""

    maximum: int = 0

    def max_entries(self, name: str) -> int:
        return self.maximum


def full_request() -> ChatRequest:
    """A chat with lists and maps on several levels, among them some of numbers, which are packed."""
    request = ChatRequest(model="m" * 200)
    for number in range(3):
        message = request.messages.add(role="assistant", content="é" * number)
        message.tool_calls.add(id="1", name="a", arguments="{}")
        message.tool_calls.add(id="2" * 130)
    request.sampling.logit_bias.update({1: 0.5, 1000: -1})
    request.sampling.allowed_token_ids.extend([1, 200, 100_000])
    request.sampling.constraint.structural_tags.tags.add(begin="<").lark = "start: A"
    request.stopping.stop.extend(["", "b", "c" * 130, "d"])
    request.stopping.stop_token_ids.extend([7, 300])
    request.template_options.arguments.update({"a": [1, [2, {"b": None}]], "c": "d"})
    return request


def entries(message: Message, prefix: str = "") -> Counter[str]:
    """The number of entries of each list and map of a message, by path."""
    found: Counter[str] = Counter()
    for field, value in message.ListFields():
        path = prefix + field.name
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.is_repeated:
            found[path] += len(value)
        if is_map:
            if field.message_type.fields_by_name["value"].message_type is not None:
                for each in value.values():
                    found += entries(each, f"{path}.value.")
        elif field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                found += entries(each, f"{path}.")
    return found


def test_a_list_of_a_message_may_have_its_maximum_and_no_entry_more():
    request = full_request()
    assert max(entries(request).values()) == entries(request)["messages.tool_calls"] == 6
    assert CountedMessage(ChatRequest, _Exactly(1024, 6)).parse(request.SerializeToString()) == request
    with pytest.raises(InvalidArgument) as raised:
        CountedMessage(ChatRequest, _Exactly(1024, 5)).parse(request.SerializeToString())
    assert [each.field for each in raised.value.violations] == ["messages.tool_calls"]
    assert "more than 5 entries" in raised.value.message


@given(data=st.data())
def test_bytes_that_protobuf_parses_have_no_more_entries_than_were_counted(data):
    """No way to write a message hides entries: bytes are changed, cut and repeated at random."""
    valid = full_request().SerializeToString()
    changed = bytearray(valid)
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, len(changed) - 1))
        length = data.draw(st.integers(0, 8))
        changed[position : position + length] = data.draw(st.binary(max_size=8))
    message = bytes(changed)
    try:
        parsed = ChatRequest.FromString(message)
    except DecodeError:
        return
    flat = {path: count for path, count in entries(parsed).items() if "arguments.fields.value" not in path}
    # Lists of token ids have a maximum of their own.
    flat.pop("sampling.allowed_token_ids", None)
    flat.pop("stopping.stop_token_ids", None)
    most = max(flat.values(), default=0)
    if most:
        with pytest.raises(InvalidArgument):
            CountedMessage(ChatRequest, _Exactly(1024, most - 1)).parse(message)


def test_packed_and_unpacked_numbers_are_counted():
    packed = ModelInferRequest()
    contents = packed.inputs.add().contents
    contents.int64_contents.extend([-1, 0, 300])
    contents.fp32_contents.extend([0.5, 0.25, 1, 2])
    data = packed.SerializeToString()
    assert CountedMessage(ModelInferRequest, _Exactly(0, 4)).parse(data) == packed
    with pytest.raises(InvalidArgument, match="fp32_contents has more than 3 entries"):
        CountedMessage(ModelInferRequest, _Exactly(0, 3)).parse(data)
    # A field number and a wire type, then one number: as old clients send lists.
    unpacked = b"\x08\x05" * 200_000
    with pytest.raises(InvalidArgument, match=r"more than 131,136 fields and entries, .* send lists of numbers packed"):
        CountedMessage(DetokenizeRequest, LIMITS).parse(unpacked)


def test_entries_behind_a_number_of_ten_bytes_are_counted():
    padded = b"\x38" + b"\x80" * 9 + b"\x00"
    data = padded + GenerateRequest(continue_from=[HeldSequence()] * 2).SerializeToString()
    with pytest.raises(InvalidArgument, match="continue_from has more than 1 entries"):
        CountedMessage(GenerateRequest, _Exactly(8, 1)).parse(data)


@pytest.mark.parametrize(
    "data",
    [b"\x80" * 1000, b"\x12", b"\x12\x7f", b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x0f\x01", b"\x09\x01"],
)
def test_bytes_that_are_no_message_are_left_to_the_parser(data):
    with pytest.raises(DecodeError):
        CountedMessage(ResumeStreamRequest, LIMITS).parse(data)


def refused(fields: dict[str, Any]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as raised:
        check_json(fields, LIMITS)
    return raised.value


@pytest.mark.parametrize(
    ("fields", "path", "count", "limit"),
    [
        ({"system": [1] * 1025}, "system", "1,025", "1,024"),
        ({"messages": [{}] * 9}, "messages", "9", "8"),
        ({"messages": [{"content": [{}] * 5000}] * 2}, "messages.content", "10,000", "8,192"),
        ({"input": [{"summary": [1] * 8193}]}, "input.summary", "8,193", "8,192"),
        ({"tools": [{"function": {"parameters": {"enum": [1] * 70_000}}}]}, "tools.function.parameters", "", "65,536"),
        ({"chat_template_kwargs": {"a": {"b": [[1] * 3000] * 2}}}, "chat_template_kwargs", "6,004", "4,096"),
        ({"documents": [{"a": {"b": 1}}] * 2000}, "documents", "", "4,096"),
        ({"metadata": {str(number): "" for number in range(1025)}}, "metadata", "1,025", "1,024"),
        ({"prompt": ["a"] * 1025}, "prompt", "1,025", "1,024"),
        ({"unknown": [[1] * 800] * 2}, "unknown", "", "1,024"),
    ],
)
def test_entries_of_a_body_count_together_by_the_path_of_their_field(fields, path, count, limit):
    error = refused(fields)
    assert [each.field for each in error.violations] == [path]
    assert f"{count} entries; the max is {limit}" in error.message


def test_paths_of_deeply_nested_objects_stay_short():
    fields: dict[str, Any] = {}
    for _ in range(400):
        fields = {"k" * 1000: fields}
    check_json(fields, LIMITS)
    inner: Any = [1] * 1025
    for _ in range(50):
        inner = {"k" * 1000: inner}
    assert len(refused(inner).violations[0].field) <= 256


def test_a_body_is_counted_in_steps():
    steps = checking_json({"guided_json": {str(number): {"a": 1} for number in range(30_000)}}, LIMITS)
    assert 30 < sum(1 for _ in steps) < 100


def test_more_numbers_than_any_prompt_needs_are_refused_before_they_are_parsed():
    with pytest.raises(InvalidArgument, match=r"the body has 1,048,577 values; at most 1,048,576"):
        check_values(b"[" + b"1," * (MAX_NUMBERS + 1) + b"1]", LIMITS)
    check_values(json.dumps({"prompt": "1, 2, " * 700_000}).encode(), LIMITS)


@pytest.mark.parametrize(
    ("body", "fewest", "most"),
    [
        ({"a": "x" * 10_000}, 10_000, 11_000),
        ({"a": "x, {} []" * 1000}, 8000, 9000),
        ({"a": "é" * 1000}, 6000, 13_000),
        ({"a": [7] * 10_000}, 400_000, 450_000),
        ({"a": [{}] * 1000}, 200_000, 310_000),
        ({"a": ["b"] * 1000}, 64_000, 120_000),
    ],
)
def test_memory_is_estimated_by_what_a_body_has(body: dict[str, Any], fewest: int, most: int):
    assert fewest <= check_values(json.dumps(body).encode(), LIMITS) <= most


@pytest.mark.parametrize(("text", "factor"), [("a", 1), ("aé", 1), ("a€", 2), ("a😀", 4)])
def test_one_wide_character_makes_a_text_wide(text: str, factor: int):
    data = json.dumps({"a": text * 10_000}, ensure_ascii=False).encode()
    assert check_values(data, LIMITS) == pytest.approx(factor * len(data), rel=0.05)


def test_what_a_message_takes_is_counted_before_it_is_parsed():
    memory = BodyMemory(1 << 20)
    held = memory.begin(lambda: None)

    def call() -> None:
        message_memory.set(held)
        CountedMessage(ChatRequest, LIMITS).parse(b"\x12\x00" * 8)

    copy_context().run(call)
    assert 8 * 64 <= memory.num_bytes <= 8 * 200


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("{}", 1), ('{"a": [1, 2]}', 4), (json.dumps({"a": '[1, 2] \\" {'}), 3), ("[[],[],[]]", 6)],
)
def test_values_in_a_text_are_not_those_in_its_strings(text, count):
    assert num_values_in(text) == count


@pytest.mark.parametrize("field", [b"\xb8\x80\x80\x80\x00\x00", b"\x3a\x80\x80\x80\x80\x00"])
def test_padded_tags_and_sizes_count_by_their_bytes(field):
    counted = CountedMessage(GenerateRequest, LIMITS)
    counted.parse(field * 20_000)
    with pytest.raises(InvalidArgument, match=r"more than 131,136 fields and entries"):
        counted.parse(field * 30_000)


def test_bodies_that_people_send_pass():
    schema = {"type": "object", "properties": {f"p{number}": {"enum": [1, 2]} for number in range(2000)}}
    check_json(
        {
            "prompt": [[1] * 100_000] * 3,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 100}] * 8,
            "tools": [{"function": {"name": "a", "parameters": schema}}] * 5,
            "allowed_token_ids": list(range(100_000)),
            "guided_choice": ["a"] * 100_000,
        },
        LIMITS,
    )
    # Answers that are sent back, as clients have them.
    entry = {"token": "a", "logprob": -1.0, "bytes": [97] * 4, "top_logprobs": [{"token": "a"}] * 2}
    parts = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": [entry] * 2000}]
    check_json({"input": [{"role": "assistant", "content": parts}] * 2}, LIMITS)
    call = {"function": {"name": "a", "arguments": "{}", "parsed_arguments": {"a": [1] * 2000}}}
    for parsed in ({"a": [[1] * 2000]}, [{"a": 1}] * 2000):
        check_json({"messages": [{"role": "assistant", "parsed": parsed, "tool_calls": [call]}] * 2}, LIMITS)


def test_more_token_ids_than_any_prompt_needs_are_refused_in_messages_too():
    counted = CountedMessage(GenerateRequest, LIMITS)
    request = GenerateRequest()
    request.token_ids.ids.extend([300] * MAX_NUMBERS)
    assert counted.parse(request.SerializeToString()) == request
    request.token_ids.ids.append(1)
    with pytest.raises(InvalidArgument, match=r"token_ids.ids has more than 1,048,576 entries, which is the max"):
        counted.parse(request.SerializeToString())


@pytest.mark.parametrize("num_texts", [2, 3, 100])
def test_texts_in_a_row_are_counted_whatever_comes_after_them(num_texts: int):
    request = GenerateRequest(continue_from=[HeldSequence()])
    request.stopping.stop.extend(["", "a", "b" * 200, *"c" * num_texts])
    data = request.SerializeToString()
    assert CountedMessage(GenerateRequest, _Exactly(8, num_texts + 3)).parse(data) == request
    with pytest.raises(InvalidArgument, match=r"stopping\.stop has more than"):
        CountedMessage(GenerateRequest, _Exactly(8, num_texts + 2)).parse(data)
