"""The client for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Self, TypeVar

import grpc

from quire.client import convert
from quire.client.credentials import show_key
from quire.client.resumption import Resumption, make_resumption, new_request_id
from quire.client.tls import ClientTls, connect
from quire.client.types import (
    ChatMessage,
    Generation,
    GenerationOptions,
    Model,
    PinnedPrefix,
    RequestCompleted,
    ServerInfo,
    StreamEvent,
    TokenChunk,
    Tokenization,
)
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc, model_pb2, model_pb2_grpc, prefix_pb2_grpc
from quire.rpc.channel import channel_options
from quire.rpc.errors import QuireError, from_rpc_error

Response = TypeVar("Response")


class AsyncStream:
    """The events of one streamed generation. Iterate over it, or over `text`; its `async with` cancels what is left.

    A durable stream goes on by itself after a lost connection, through whatever gateway answers. Leaving it does not
    end its request, the client's `cancel` does.

    Attributes:
        request_id: Of a durable request, by which it can be cancelled.
        completed: The last event, once it has come.
    """

    def __init__(self, call: Any, resumption: Resumption | None = None) -> None:
        self.completed: RequestCompleted | None = None
        self.request_id = None if resumption is None else resumption.request_id
        self._call = call
        self._resumption = resumption
        self._responses = call.__aiter__()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        while True:
            if self._closed:
                raise StopAsyncIteration
            try:
                event = convert.from_stream_response(await anext(self._responses))
            except asyncio.CancelledError:
                # grpc.aio raises it also where `close` was called while this task waited.
                if self._closed and not _is_cancelled():
                    raise StopAsyncIteration from None
                raise
            except grpc.RpcError as error:
                await self._go_on_after(from_rpc_error(error))
                continue
            if self._resumption is not None and not self._resumption.accept(event):
                continue
            if isinstance(event, RequestCompleted):
                self.completed = event
            return event

    async def _go_on_after(self, error: QuireError) -> None:
        """Resumes a durable stream; raises the error where it cannot be."""
        if self._resumption is None or self.completed is not None:
            raise error from None
        await asyncio.sleep(self._resumption.delay_after(error))
        if not self._closed:
            self._call = self._resumption.call()
            self._responses = self._call.__aiter__()

    @property
    async def text(self) -> AsyncIterator[str]:
        """The text of the first sequence as it comes, piece by piece."""
        async for event in self:
            if isinstance(event, TokenChunk) and event.sequence_index == 0 and event.text:
                yield event.text

    async def close(self) -> None:
        """Cancels the call if it still runs; the request's memory is freed within one step."""
        self._closed = True
        self._call.cancel()


class AsyncClient:
    """A connection to a gateway, to be used from any number of tasks of one event loop.

    Every method takes `timeout_s` and raises an error of `quire.rpc.errors` when the call fails: for example
    InvalidArgument, ResourceExhausted (with `retry_after_ms`), Unavailable, DeadlineExceeded.

    Args:
        address: "HOST:PORT" or "unix:PATH".
        api_key: What the gateway knows the caller by, where it asks for one. Without TLS everyone between can read it.
        tls: Whom to believe, where the gateway speaks TLS; without it nothing is encrypted. ConfigurationError when its
            files cannot be read.
    """

    def __init__(
        self, address: str = "127.0.0.1:50051", *, api_key: str | None = None, tls: ClientTls | None = None
    ) -> None:
        self.address = address
        self._channel: grpc.aio.Channel = connect(grpc.aio, address, channel_options(address), tls)
        calls = show_key(self._channel, api_key)
        self._generation = generation_pb2_grpc.GenerationServiceStub(calls)
        self._models = model_pb2_grpc.ModelServiceStub(calls)
        self._prefixes = prefix_pb2_grpc.PrefixServiceStub(calls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running calls are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Continues a text or token ids; answers when all sequences are finished."""
        request = convert.to_generate_request(
            generation_pb2.GenerateRequest(), prompt, options, model=model, request_id=request_id, priority=priority
        )
        return convert.from_generate_response(await _call(self._generation.Generate, request, timeout_s))

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        durable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Continues a text or token ids; the stream gives tokens as they come, and outlives gateways where
        it is durable."""
        message = generation_pb2.GenerateStreamRequest()
        request = convert.to_generate_request(
            message, prompt, options, model=model, request_id=request_id, priority=priority
        )
        return self._stream(self._generation.GenerateStream, request, timeout_s, durable=durable)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Answers a conversation by the model's chat template."""
        request = convert.to_chat_request(
            generation_pb2.ChatRequest(), messages, options, model=model, request_id=request_id, priority=priority
        )
        return convert.from_generate_response(await _call(self._generation.Chat, request, timeout_s))

    def chat_stream(
        self,
        messages: Sequence[ChatMessage],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        durable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Answers a conversation; the stream gives tokens as they come, and outlives gateways where
        it is durable."""
        request = convert.to_chat_request(
            generation_pb2.ChatStreamRequest(), messages, options, model=model, request_id=request_id, priority=priority
        )
        return self._stream(self._generation.ChatStream, request, timeout_s, durable=durable)

    def _stream(
        self, start: Callable[..., Any], request: Any, timeout_s: float | None, *, durable: bool
    ) -> AsyncStream:
        if not durable:
            return AsyncStream(start(request, timeout=timeout_s))
        request.durable = True
        request.request_id = request.request_id or new_request_id()
        resumption = make_resumption(start, self._generation.ResumeStream, request, timeout_s)
        return AsyncStream(start(request, timeout=timeout_s), resumption)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a running request by its id; NotFound when no such request runs."""
        request = generation_pb2.CancelRequest()
        convert.fill(request, request_id=request_id)
        await _call(self._generation.Cancel, request, timeout_s)

    async def tokenize(
        self,
        text_or_messages: str | Sequence[ChatMessage],
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Tokenization:
        """The token ids of a text or a conversation, as `generate` and `chat` would see them."""
        request = convert.to_tokenize_request(text_or_messages, add_special_tokens=add_special_tokens, model=model)
        return convert.from_tokenize_response(await _call(self._generation.Tokenize, request, timeout_s))

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        include_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        request = convert.to_detokenize_request(token_ids, include_special_tokens=include_special_tokens, model=model)
        return (await _call(self._generation.Detokenize, request, timeout_s)).text

    async def pin_prefix(
        self,
        prefix: str | Sequence[int] | Sequence[ChatMessage],
        *,
        time_to_live_ms: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> PinnedPrefix:
        """Keeps a text, token ids or the start of a conversation cached for a while; again starts its time anew."""
        request = convert.to_pin_request(prefix, time_to_live_ms=time_to_live_ms, model=model)
        return convert.from_pin_response(await _call(self._prefixes.PinPrefix, request, timeout_s))

    async def unpin_prefix(self, pin_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a pin; NotFound when no scheduler has it (any more)."""
        await _call(self._prefixes.UnpinPrefix, convert.to_unpin_request(pin_id), timeout_s)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """All models served here."""
        response = await _call(self._models.ListModels, model_pb2.ListModelsRequest(), timeout_s)
        return tuple(convert.from_model(model) for model in response.models)

    async def get_model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """One model; NotFound when it is not served here."""
        request = model_pb2.GetModelRequest()
        convert.fill(request, model=name)
        return convert.from_model((await _call(self._models.GetModel, request, timeout_s)).model)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The gateway's version, limits and replicas."""
        response = await _call(self._models.GetServerInfo, model_pb2.GetServerInfoRequest(), timeout_s)
        return convert.from_server_info(response)


async def _call(method: Callable[..., Awaitable[Response]], request: Any, timeout_s: float | None) -> Response:
    try:
        return await method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
