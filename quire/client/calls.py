"""What each method of a client sends to whom, and how it reads the answer. The clients do the calling."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar, Unpack

from quire.client import convert
from quire.client.connection import Stubs
from quire.client.convert import GenerationFields
from quire.client.fields import put
from quire.client.types import (
    AnyChatMessage,
    Generation,
    GenerationOptions,
    Model,
    PinnedPrefix,
    ServerInfo,
    Tokenization,
)
from quire.gateway.v1 import generation_pb2, model_pb2

Answer = TypeVar("Answer")
Method = Callable[[Stubs], Callable[..., Any]]
"""A method of one of the stubs."""


@dataclass(frozen=True, slots=True)
class Unary(Generic[Answer]):
    """A call with one answer.

    Attributes:
        method: Which one.
        request: What it is sent.
        read: What the answer says.
        is_idempotent: Whether it may be made twice.
    """

    method: Method
    request: Any
    read: Callable[[Any], Answer]
    is_idempotent: bool = True


@dataclass(frozen=True, slots=True)
class Streaming:
    """A call that is answered by a stream of events, and what it is sent."""

    method: Method
    request: generation_pb2.GenerateStreamRequest | generation_pb2.ChatStreamRequest


def generate(
    prompt: str | Sequence[int], options: GenerationOptions | None, **fields: Unpack[GenerationFields]
) -> Unary[Generation]:
    request = convert.to_generate_request(generation_pb2.GenerateRequest(), prompt, options, **fields)
    return Unary(lambda stubs: stubs.generation.Generate, request, convert.from_generate_response, is_idempotent=False)


def chat(
    messages: Sequence[AnyChatMessage], options: GenerationOptions | None, **fields: Unpack[GenerationFields]
) -> Unary[Generation]:
    request = convert.to_chat_request(generation_pb2.ChatRequest(), messages, options, **fields)
    return Unary(lambda stubs: stubs.generation.Chat, request, convert.from_generate_response, is_idempotent=False)


def generate_stream(
    prompt: str | Sequence[int], options: GenerationOptions | None, **fields: Unpack[GenerationFields]
) -> Streaming:
    request = convert.to_generate_request(generation_pb2.GenerateStreamRequest(), prompt, options, **fields)
    return Streaming(lambda stubs: stubs.generation.GenerateStream, request)


def chat_stream(
    messages: Sequence[AnyChatMessage], options: GenerationOptions | None, **fields: Unpack[GenerationFields]
) -> Streaming:
    request = convert.to_chat_request(generation_pb2.ChatStreamRequest(), messages, options, **fields)
    return Streaming(lambda stubs: stubs.generation.ChatStream, request)


def cancel(request_id: str) -> Unary[None]:
    request = generation_pb2.CancelRequest()
    put(request, "request_id", request_id)
    return Unary(lambda stubs: stubs.generation.Cancel, request, _nothing)


def tokenize(
    text_or_messages: str | Sequence[AnyChatMessage], *, add_special_tokens: bool | None, model: str | None
) -> Unary[Tokenization]:
    request = convert.to_tokenize_request(text_or_messages, add_special_tokens=add_special_tokens, model=model)
    return Unary(lambda stubs: stubs.generation.Tokenize, request, convert.from_tokenize_response)


def detokenize(token_ids: Sequence[int], *, include_special_tokens: bool | None, model: str | None) -> Unary[str]:
    request = convert.to_detokenize_request(token_ids, include_special_tokens=include_special_tokens, model=model)
    return Unary(lambda stubs: stubs.generation.Detokenize, request, attrgetter("text"))


def pin_prefix(
    prefix: str | Sequence[int] | Sequence[AnyChatMessage], *, time_to_live_ms: int | None, model: str | None
) -> Unary[PinnedPrefix]:
    request = convert.to_pin_request(prefix, time_to_live_ms=time_to_live_ms, model=model)
    return Unary(lambda stubs: stubs.prefixes.PinPrefix, request, convert.from_pin_response)


def unpin_prefix(pin_id: str) -> Unary[None]:
    return Unary(lambda stubs: stubs.prefixes.UnpinPrefix, convert.to_unpin_request(pin_id), _nothing)


def list_models() -> Unary[tuple[Model, ...]]:
    return Unary(lambda stubs: stubs.models.ListModels, model_pb2.ListModelsRequest(), convert.from_models)


def get_model(name: str) -> Unary[Model]:
    request = model_pb2.GetModelRequest()
    put(request, "model", name)
    return Unary(lambda stubs: stubs.models.GetModel, request, lambda response: convert.from_model(response.model))


def server_info() -> Unary[ServerInfo]:
    return Unary(lambda stubs: stubs.models.GetServerInfo, model_pb2.GetServerInfoRequest(), convert.from_server_info)


def _nothing(_: object) -> None:
    """Reads an answer that says nothing."""
