"""Fills every list, map and text of requests up to the limits: no other caller notices.

The calls are made from the contracts and from /openapi.json, so that new fields are included.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import grpc.aio
import httpx
import pytest
import pytest_asyncio
from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.internal import encoder
from google.protobuf.message_factory import GetMessageClass
from pydantic_core import to_json

from gateway.request.counting import EntryLimits
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.inference import open_inference_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.measured_gateway import MeasuredGateway, measured_gateway
from tests.support.tiers import is_third_tier

pytestmark = pytest.mark.extended
# Maximum size of a message, less the fields around the filled one.
_ROOM = 4 * 1024 * 1024 - 4096
# Levels of messages within messages; only messages of google.protobuf.Struct go deeper.
_MAX_DEPTH = 5
_varint: Callable[[int], bytes] = lru_cache(128)(encoder._VarintBytes)  # pyrefly: ignore
_WIRE_TYPES = {FieldDescriptor.TYPE_DOUBLE: 1, FieldDescriptor.TYPE_FLOAT: 5}
_GENERATE = {"text": "a", "stopping": {"max_tokens": 1}}
_CHAT = {"messages": [{"role": "user", "content": "a"}], "stopping": {"max_tokens": 1}}
_VALID: Mapping[str, dict[str, Any]] = {
    "quire.gateway.v1.ChatMessage": {"role": "assistant", "content": "a"},
    "quire.gateway.v1.ToolCall": {"id": "1", "name": "a", "arguments": "{}"},
    "quire.gateway.v1.Tool": {"name": "a"},
    **dict.fromkeys(("quire.gateway.v1.GenerateRequest", "quire.gateway.v1.GenerateStreamRequest"), _GENERATE),
    **dict.fromkeys(("quire.gateway.v1.ChatRequest", "quire.gateway.v1.ChatStreamRequest"), _CHAT),
    "quire.gateway.v1.ChatMessages": {"messages": _CHAT["messages"]},
    "quire.gateway.v1.TokenizeRequest": {"text": "a"},
    "quire.gateway.v1.PinPrefixRequest": {"text": "a"},
    "quire.gateway.v1.ResumeStreamRequest": {"request_id": "a"},
    "inference.ModelInferRequest": {
        "model_name": "quire-tiny",
        "inputs": [
            {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"a"]}},
            {
                "name": "sampling_parameters",
                "datatype": "BYTES",
                "shape": [1],
                "contents": {"bytes_contents": [b'{"max_tokens": 1}']},
            },
        ],
    },
}
"""Fields with which a message passes the checks that look at single values."""


# Texts by the work that they cause: words to tokenize, JSON to parse, and a run that is one word.
_TEXTS: Mapping[str, bytes] = {"words": b"a b ", "lists": b"[],", "one word": b"a"}


@dataclass(frozen=True, slots=True)
class GrpcCall:
    """`name` is the path of the field that is filled."""

    name: str
    method: str
    make: Callable[[], bytes]
    streams: bool


@dataclass(frozen=True, slots=True)
class HttpCall:
    name: str
    path: str
    make: Callable[[], bytes]


def grpc_calls(services: Sequence[ServiceDescriptor], limits: EntryLimits) -> Iterator[GrpcCall]:
    """Calls for each list, map and text of each method's request: the maximum number of entries by size, empty and
    smallest valid ones; the allowed number of entries, small ones and such that they fill the message; long texts."""
    for service in services:
        for method in service.methods:
            kind = method.input_type
            for path in _paths(kind, ()):
                for how, number, entry in _fillings(path[-1], limits):
                    name = f"{method.name}.{'.'.join(field.name for field in path)} of {how}"
                    make = partial(_filled, kind, path, entry, number)
                    yield GrpcCall(name, f"/{service.full_name}/{method.name}", make, method.server_streaming)


def _paths(kind: Descriptor, above: tuple[FieldDescriptor, ...]) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in kind.fields:
        path = (*above, field)
        if field.is_repeated or _is_text(field):
            yield path
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        if (
            inner is not None
            and not is_map
            and len(path) < _MAX_DEPTH
            and inner not in [each.message_type for each in above]
        ):
            yield from _paths(inner, path)


def _long(text: bytes) -> bytes:
    """A text that fills the message. It is a list in JSON if `text` is a value with a comma."""
    return b"[" + text * (_ROOM // len(text) - 64) + b"1]"


def _is_text(field: FieldDescriptor) -> bool:
    return field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def _fillings(field: FieldDescriptor, limits: EntryLimits) -> Iterator[tuple[str, int, Callable[[int], bytes]]]:
    """Ways to fill a field: the number of entries, and a function that makes the bytes of each."""
    if not field.is_repeated:
        for how, text in _TEXTS.items():
            yield f"{how} as text", 1, lambda _, text=text: _delimited(field.number, _long(text))
        return
    allowed = limits.max_entries(field.name)
    for how, entry in _entries(field):
        yield how, _ROOM // len(entry(0)), entry
        yield f"{allowed:,} {how}", allowed, entry
    if _is_text(field):
        yield f"{allowed:,} long texts", allowed, lambda _: _delimited(field.number, b"a" * (_ROOM // allowed - 8))


def _entries(field: FieldDescriptor) -> Iterator[tuple[str, Callable[[int], bytes]]]:
    """The entries of a list or map, by their numbers."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key = kind.fields_by_name["key"]

        def entry(number: int) -> bytes:
            text = key.type == FieldDescriptor.TYPE_STRING
            return _delimited(field.number, _delimited(1, b"%x" % number) if text else _varint(8) + _varint(number))

        yield "entries", entry
    elif kind is not None:
        yield "empty messages", lambda _: _delimited(field.number, b"")
        if valid := _valid(kind):
            yield "valid messages", lambda _: _delimited(field.number, valid)
    elif _is_text(field):
        yield "empty texts", lambda _: _delimited(field.number, b"")
        yield "texts", lambda number: _delimited(field.number, b"%x" % number)
    else:
        wire_type = _WIRE_TYPES.get(field.type, 0)
        value = {0: b"\x01", 1: bytes(8), 5: bytes(4)}[wire_type]
        yield "unpacked numbers", lambda _: _varint(field.number << 3 | wire_type) + value
        yield "numbers", lambda _: value


def _filled(kind: Descriptor, path: Sequence[FieldDescriptor], entry: Callable[[int], bytes], number: int) -> bytes:
    """A message with `number` entries at `path`, or the number that fits."""
    first = entry(0)
    if entry(1) == first:
        data = first * min(number, _ROOM // len(first))
    else:
        data = b"".join(map(entry, range(min(number, _ROOM // len(entry(number))))))
    if not path[-1].message_type and not _is_text(path[-1]) and first[0] in (0, 1):
        data = _delimited(path[-1].number, data)
    for field in reversed(path[:-1]):
        data = _delimited(field.number, _valid(cast(Descriptor, field.message_type)) + data)
    return _valid(kind) + data


def _valid(kind: Descriptor) -> bytes:
    message = GetMessageClass(kind)
    return message(**_VALID.get(kind.full_name, {})).SerializeToString()


def _delimited(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
}
"""Bodies that are answered, by their paths; a field is added to them."""
_NEIGHBOURS: Mapping[str, dict[str, Any]] = {
    "content": {"role": "user"},
    "tool_calls": {"role": "assistant"},
    "schema": {"type": "json_schema", "name": "a"},
    "parameters": {"name": "a"},
    "input_schema": {"name": "a"},
}
_ENTRIES: Mapping[str, bytes] = {"numbers": b"1", "objects": b"{}", "lists": b"[]"}


def http_calls(document: Mapping[str, Any], limits: EntryLimits) -> Iterator[HttpCall]:
    """Calls for each list, object of any fields and text of each body in /openapi.json: the maximum number of entries
    by size; the allowed number of entries, small ones and such that they fill the body; long texts."""
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is None:
            continue
        schema = body["content"]["application/json"]["schema"]
        places = dict(_places(document, schema, ()))
        for where, kinds in places.items():
            for how, value in _values(kinds, limits.max_entries(str(where[-1]))):
                yield HttpCall(f"{path} {'.'.join(map(str, where))} of {how}", path, partial(_body, path, where, value))


def _places(
    document: Mapping[str, Any], schema: Mapping[str, Any], above: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], frozenset[str]]]:
    """The paths of all fields, with the types that each may have: "array", "object", "string"."""
    if len(above) > 6:
        return
    for name, inner in _resolved(document, schema).get("properties", {}).items():
        kinds: set[str] = set()
        for each in _alternatives(document, inner):
            if each.get("type") == "object" and "properties" in each:
                yield from _places(document, each, (*above, name))
            elif each.get("type") in ("array", "object", "string"):
                kinds.add(each["type"])
            for item in _alternatives(document, each.get("items", {})):
                yield from _places(document, item, (*above, name, 0))
        if kinds:
            yield (*above, name), frozenset(kinds)


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _alternatives(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    schema = _resolved(document, schema)
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if not inner:
        yield schema
    for each in inner:
        yield from _alternatives(document, each)


def _values(kinds: Set[str], allowed: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Values to fill a field with, as JSON."""
    if "array" in kinds:
        for how, entry in _ENTRIES.items():
            number = allowed if how == "objects" else _ROOM // (len(entry) + 1)
            yield f"{number:,} {how}", partial(_list_of, entry, number)
        yield f"{allowed:,} long texts", lambda: _list_of(b'"' + b"a" * (_ROOM // allowed - 3) + b'"', allowed)
    if "object" in kinds:
        yield "entries", partial(_object_of, _ROOM // 11)
        yield "1,024 entries", partial(_object_of, 1024)
        yield "a list in an object", lambda: b'{"a":' + _list_of(b"1", _ROOM // 2 - 8) + b"}"
    if "string" in kinds:
        for how, text in _TEXTS.items():
            yield f"{how} as text", lambda text=text: b'"' + _long(text) + b'"'


def _list_of(entry: bytes, number: int) -> bytes:
    return b"[" + b",".join([entry] * number) + b"]"


@lru_cache
def _object_of(number: int) -> bytes:
    return b"{" + b",".join(b'"%x":1' % each for each in range(number)) + b"}"


def _body(path: str, where: Sequence[str | int], value: Callable[[], bytes]) -> bytes:
    """The body with a value at a path."""
    marker = "\u2603"
    inner: Any = marker
    for step in reversed(where[1:]):
        inner = [inner] if isinstance(step, int) else {**_NEIGHBOURS.get(step, {}), step: inner}
    return to_json(_BODIES.get(path, {}) | {where[0]: inner}).replace(to_json(marker), value())


LONGEST_TURN_MS = 100
MAX_MEMORY_MIB = 400
SERVICES = [
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
]
LIMITS = EntryLimits(max_messages=1024)

Call = Callable[[], Awaitable[object]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway() -> AsyncIterator[MeasuredGateway]:
    async with FakeScheduler(max_model_len=60_000) as scheduler, measured_gateway(scheduler) as gateway:
        yield gateway


async def sweep(gateway: MeasuredGateway, calls: Iterable[tuple[str, Call]]) -> int:
    """Makes the calls, one after the other. Returns their number."""
    num_calls = 0
    for name, call in calls:
        num_calls += 1
        await gateway.assert_short_turns(name, call, LONGEST_TURN_MS)
        assert gateway.process.returncode is None, f"{name} ended the gateway"
    assert gateway.peak_memory_mib() < MAX_MEMORY_MIB
    return num_calls


def over_grpc(channel: grpc.aio.Channel) -> Iterable[tuple[str, Call]]:
    for each in grpc_calls(SERVICES, LIMITS):

        async def call(each=each) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if each.streams:
                    async for _ in channel.unary_stream(each.method)(each.make()):
                        pass
                else:
                    await channel.unary_unary(each.method)(each.make())

        yield each.name, call


async def over_http(http: httpx.AsyncClient) -> list[tuple[str, Call]]:
    async def call(path: str, body: bytes) -> None:
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, answer.text

    document = (await http.get("/openapi.json")).json()
    return [(each.name, lambda each=each: call(each.path, each.make())) for each in http_calls(document, LIMITS)]


# The third tier makes all calls, which fill each field of gRPC in two ways or more, each of HTTP in three.
GRPC_STEP, HTTP_STEP = (1, 1) if is_third_tier() else (13, 23)


async def test_fields_of_grpc_calls_at_their_limits(gateway):
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        assert await sweep(gateway, list(over_grpc(channel))[::GRPC_STEP]) > 700 // GRPC_STEP


async def test_fields_of_http_bodies_at_their_limits(gateway):
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=None) as http:
        assert await sweep(gateway, (await over_http(http))[::HTTP_STEP]) > 900 // HTTP_STEP
