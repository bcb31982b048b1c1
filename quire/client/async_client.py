"""The client for asyncio."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Self
from weakref import WeakSet

import grpc

from quire.client import calls
from quire.client.addresses import split_addresses
from quire.client.calls import Answer, Streaming, Unary
from quire.client.connection import make_stubs, open_channel
from quire.client.events import EventStream, first_text
from quire.client.resumption import Recovery, make_recovery
from quire.client.retries import Attempts, RetryPolicy
from quire.client.timing import CallTime
from quire.client.tls import ClientTls
from quire.client.types import (
    AnyChatMessage,
    Generation,
    GenerationOptions,
    Model,
    PinnedPrefix,
    ServerInfo,
    StreamEvent,
    Tokenization,
)
from quire.rpc.errors import Cancelled, from_rpc_error


class AsyncStream(EventStream):
    """The events of one streamed generation. Iterate over it, or over `text`; its `async with` cancels what is left.

    A durable stream goes on by itself after a lost connection, through whatever gateway answers, and from the tokens
    that came where no server has its request any more. Leaving it does not end its request, the client's `cancel` does.

    Attributes:
        request_id: Of a durable request, by which it can be cancelled.
        completed: The last event, once it has come.
    """

    def __init__(self, recovery: Recovery) -> None:
        super().__init__(recovery)
        self._closing = asyncio.Event()
        self._is_cut = False
        self._responses = self._call.__aiter__()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._closed:
            try:
                event = self._accept(await anext(self._responses))
            except asyncio.CancelledError:
                # grpc.aio raises it also where `close` or `cut` was called while this task waited.
                if _is_cancelled():
                    raise
                if self._closed or self.completed is not None:
                    break
                raise _client_closed() from None
            except grpc.RpcError as error:
                if self.completed is not None:
                    break  # the caller has all of it
                if self._is_cut:
                    raise _client_closed() from None
                await self._go_on_after(error)
                continue
            if event is not None:
                return event
        raise StopAsyncIteration

    async def _go_on_after(self, error: grpc.RpcError) -> None:
        """Makes the next call; raises the error where there is none."""
        with suppress(TimeoutError):
            # `close` ends the wait.
            async with asyncio.timeout(self._delay_after(error)):
                await self._closing.wait()
        if self._is_cut:
            raise _client_closed()
        if not self._closed:
            self._call = self._recovery.call()
            self._responses = self._call.__aiter__()

    @property
    async def text(self) -> AsyncIterator[str]:
        """The text of the first sequence as it comes, piece by piece."""
        async for event in self:
            if text := first_text(event):
                yield text

    async def close(self) -> None:
        """Cancels the call if it still runs; the request's memory is freed within one step."""
        self._closed = True
        self._closing.set()
        self._call.cancel()

    def cut(self) -> None:
        """The client is closed: who reads gets Cancelled, but for what is completed."""
        self._is_cut = True
        self._closing.set()
        self._call.cancel()


class AsyncClient:
    """A connection to a gateway, or to several in turn, to be used from any number of tasks of one event loop.

    Every method takes `timeout_s` and raises an error of `quire.rpc.errors` when the call fails: for example
    InvalidArgument, ResourceExhausted (with `retry_after_ms`), Unavailable, DeadlineExceeded. Calls that may be made
    twice, which generations are not, are made again a few times where the connection was lost.

    Args:
        address: "HOST:PORT" or "unix:PATH"; several with commas, or as a sequence. Calls go in turn to all gateways
            that can be reached, and so they do to all addresses of one name. Names in a list are looked up once, here.
            ConfigurationError when one of several is malformed, Unavailable when of several names none is known.
        api_key: What the gateway knows the caller by, where it asks for one. Without TLS everyone between can read it.
        tls: Whom to believe, where the gateway speaks TLS; without it nothing is encrypted. ConfigurationError when its
            files cannot be read, and when gateways on several hosts come without its `server_name`.
        retry: When to call again after a refusal, and what; None never does, but for durable streams that were lost.
    """

    def __init__(
        self,
        address: str | Sequence[str] = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.address = ",".join(split_addresses(address))
        self._retry = retry
        self._channel: grpc.aio.Channel = open_channel(grpc.aio, address, tls)
        self._stubs = make_stubs(self._channel, api_key)
        self._streams: WeakSet[AsyncStream] = WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running calls are cancelled, and raise Cancelled."""
        for stream in list(self._streams):
            stream.cut()
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
        call = calls.generate(prompt, options, model=model, request_id=request_id, priority=priority)
        return await self._ask(call, timeout_s)

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
        """Continues a text or token ids; the stream gives tokens as they come, and outlives the server's
        processes where it is durable."""
        call = calls.generate_stream(prompt, options, model=model, request_id=request_id, priority=priority)
        return self._stream(call, timeout_s, durable=durable)

    async def chat(
        self,
        messages: Sequence[AnyChatMessage],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """Answers a conversation by the model's chat template."""
        call = calls.chat(messages, options, model=model, request_id=request_id, priority=priority)
        return await self._ask(call, timeout_s)

    def chat_stream(
        self,
        messages: Sequence[AnyChatMessage],
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        durable: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncStream:
        """Answers a conversation; the stream gives tokens as they come, and outlives the server's
        processes where it is durable."""
        call = calls.chat_stream(messages, options, model=model, request_id=request_id, priority=priority)
        return self._stream(call, timeout_s, durable=durable)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a running request by its id; NotFound when no such request runs."""
        await self._ask(calls.cancel(request_id), timeout_s)

    async def tokenize(
        self,
        text_or_messages: str | Sequence[AnyChatMessage],
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Tokenization:
        """The token ids of a text or a conversation, as `generate` and `chat` would see them."""
        call = calls.tokenize(text_or_messages, add_special_tokens=add_special_tokens, model=model)
        return await self._ask(call, timeout_s)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        include_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """The text of token ids."""
        call = calls.detokenize(token_ids, include_special_tokens=include_special_tokens, model=model)
        return await self._ask(call, timeout_s)

    async def pin_prefix(
        self,
        prefix: str | Sequence[int] | Sequence[AnyChatMessage],
        *,
        time_to_live_ms: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> PinnedPrefix:
        """Keeps a text, token ids or the start of a conversation cached for a while; again starts its time anew."""
        call = calls.pin_prefix(prefix, time_to_live_ms=time_to_live_ms, model=model)
        return await self._ask(call, timeout_s)

    async def unpin_prefix(self, pin_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a pin; NotFound when no scheduler has it (any more)."""
        await self._ask(calls.unpin_prefix(pin_id), timeout_s)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """All models served here."""
        return await self._ask(calls.list_models(), timeout_s)

    async def get_model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """One model; NotFound when it is not served here."""
        return await self._ask(calls.get_model(name), timeout_s)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The gateway's version, limits and replicas."""
        return await self._ask(calls.server_info(), timeout_s)

    async def _ask(self, call: Unary[Answer], timeout_s: float | None) -> Answer:
        method = call.method(self._stubs)
        attempts = Attempts(self._retry, CallTime.of(timeout_s), call.is_idempotent)
        while True:
            try:
                return call.read(await method(call.request, timeout=attempts.time.left_s()))
            except grpc.RpcError as error:
                delay_s = attempts.delay_after(from_rpc_error(error))
            except asyncio.CancelledError:
                # grpc.aio raises it also where the channel was closed.
                if _is_cancelled():
                    raise
                raise _client_closed() from None
            await asyncio.sleep(delay_s)

    def _stream(self, call: Streaming, timeout_s: float | None, *, durable: bool) -> AsyncStream:
        stream = AsyncStream(make_recovery(call, self._stubs, self._retry, timeout_s, durable=durable))
        self._streams.add(stream)
        return stream


def _client_closed() -> Cancelled:
    return Cancelled("the client was closed")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
