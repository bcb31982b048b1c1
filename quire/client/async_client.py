"""The client for asyncio, from which tools/generate_sync_client.py makes the blocking one."""

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary

import grpc.aio

from quire.client import client_messages as convert
from quire.client.connection import ClientTls, make_stubs, open_channel, split_addresses
from quire.client.retries import Attempts, CallTime, Recovery, Resumption, RetryPolicy, make_recovery
from quire.client.types import (
    Adapter,
    AnyChatMessage,
    ChatFields,
    Embeddings,
    Generation,
    GenerationFields,
    GenerationOptions,
    Model,
    PinnedPrefix,
    Ranking,
    RequestCompleted,
    Scores,
    ServerInfo,
    StreamEvent,
    TokenChunk,
    Tokenization,
)
from quire.client.waiting import (
    AsyncBatches,
    AsyncEvent,
    async_call,
    async_canceller,
    async_next_response,
    async_requests_of,
    async_was_accepted,
    cancelled_once,
    client_closed,
)
from quire.gateway.v1 import embedding_pb2, generation_pb2, model_pb2, prefix_pb2
from quire.rpc.errors import QuireError, Unavailable

Answer = TypeVar("Answer")


class AsyncStream:
    """The events of one streamed generation. Iterate over it, or over `text`; its `async with` cancels the rest of the
    generation, as does the end of the last reference to it.

    A durable stream continues by itself after a lost connection, through any gateway that answers, or from the received
    tokens if no server has its request any more. Only the client's `cancel` ends its request, not closing the stream.

    Attributes:
        request_id: The id of a durable request, by which it can be cancelled.
        completed: The last event, once it has come.
    """

    def __init__(self, recovery: Recovery, client_is_closed: AsyncEvent) -> None:
        """Makes the first call. Raises Cancelled if `client_is_closed` is set."""
        self.completed: RequestCompleted | None = None
        self.request_id = recovery.request_id if isinstance(recovery, Resumption) else None
        self._recovery = recovery
        self._is_closed = False
        self._is_cut = False
        self._closing = AsyncEvent()
        self._client_is_closed = client_is_closed
        self._cancel_forgotten: Callable[[], object] = lambda: None
        self._call = self._make_call()

    def __del__(self) -> None:
        # Newer versions of gRPC than 1.80 read a call to its end that nothing refers to.
        self._cancel_forgotten()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        while not self._is_closed:
            try:
                response = await async_next_response(self._call)
            except StopAsyncIteration:
                if self._is_closed or self.completed is not None:
                    break
                await self._go_on_after(Unavailable("the stream ended before its last event"))
                continue
            except QuireError as error:
                if self._is_closed or self.completed is not None:
                    break  # the caller wants no more, or has everything
                await self._go_on_after(error)
                continue
            event = self._recovery.accept(convert.from_stream_response(response))
            if event is None:
                continue
            if isinstance(event, RequestCompleted):
                self.completed = event
            return event
        raise StopAsyncIteration

    async def _go_on_after(self, error: QuireError) -> None:
        """Makes the next call; raises the error if there is no next call."""
        if not self._is_cut and await async_was_accepted(self._call):
            self._recovery.record_accepted()
        if not self._is_cut:
            await self._closing.wait(self._recovery.delay_after(error))
        if self._is_cut:
            raise client_closed() from None
        if not self._is_closed:
            self._call = self._make_call()
            if self._is_closed or self._is_cut:
                self._call.cancel()

    def _make_call(self) -> Any:
        with cancelled_once(self._client_is_closed):
            made = self._recovery.call()
        self._cancel_forgotten = async_canceller(made)
        return made

    @property
    async def text(self) -> AsyncIterator[str]:
        """The text of the first sequence as it comes, piece by piece."""
        async for event in self:
            if isinstance(event, TokenChunk) and event.sequence_index == 0 and event.text:
                yield event.text

    async def close(self) -> None:
        """Cancels the call if it still runs; the request's memory is freed within one step."""
        self._is_closed = True
        self._closing.set()
        self._call.cancel()

    def cut(self) -> None:
        """Called when the client is closed: reading then raises Cancelled, unless the stream is completed."""
        self._is_cut = True
        self._closing.set()
        self._call.cancel()


class AsyncClient:
    """A connection to a gateway, or to several in turn. Any number of tasks of one event loop may use it.

    Every method takes `timeout_s` and raises an error of `quire.rpc.errors` when the call fails: for example
    InvalidArgument, ResourceExhausted (with `retry_after_ms`), Unavailable, DeadlineExceeded. Idempotent calls, which
    generations are not, are retried a few times after a lost connection.

    Args:
        address: "HOST:PORT" or "unix:PATH"; several with commas, or as a sequence. Calls go in turn to all gateways
            that can be reached, and also to all addresses of one name. Names in a list are looked up once, here.
            Raises ConfigurationError if one of several is malformed, Unavailable if all of several names are unknown.
        api_key: Identifies the caller if the gateway requires it. Without TLS, it can be read on the network path.
        tls: The authorities to trust if the gateway speaks TLS; None encrypts nothing. Raises ConfigurationError if its
            files cannot be read, or if it has no `server_name` for gateways on several hosts.
        retry: When to call again after a refusal; None never does, except for durable streams that were lost.
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
        self._streams: WeakKeyDictionary[AsyncStream, None] = WeakKeyDictionary()
        self._is_closed = AsyncEvent()
        # The blocking client needs it: a thread may close the client while others start streams.
        self._lock = threading.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running calls are cancelled, and raise Cancelled."""
        with self._lock:
            self._is_closed.set()
            streams = list(self._streams)
        for stream in streams:
            stream.cut()
        await self._channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Unpack[GenerationFields],
    ) -> Generation:
        """Continues a text or token ids; answers when all sequences are finished."""
        request = convert.to_generate_request(generation_pb2.GenerateRequest(), prompt, options, **fields)
        method, read = self._stubs.generation.Generate, convert.from_generate_response
        return await self._ask(method, request, read, timeout_s, is_idempotent=False)

    def generate_stream(
        self,
        prompt: str | Sequence[int],
        options: GenerationOptions | None = None,
        *,
        durable: bool = False,
        timeout_s: float | None = None,
        **fields: Unpack[GenerationFields],
    ) -> AsyncStream:
        """Continues a text or token ids; the stream gives tokens as they come. A durable stream outlives the server's
        processes."""
        request = convert.to_generate_request(generation_pb2.GenerateStreamRequest(), prompt, options, **fields)
        return self._stream(self._stubs.generation.GenerateStream, request, timeout_s, durable=durable)

    async def chat(
        self,
        messages: Sequence[AnyChatMessage],
        options: GenerationOptions | None = None,
        *,
        timeout_s: float | None = None,
        **chat: Unpack[ChatFields],
    ) -> Generation:
        """Answers a conversation by the model's chat template, with the tools and the format if they are given."""
        request = convert.to_chat_request(generation_pb2.ChatRequest(), messages, options, chat)
        method, read = self._stubs.generation.Chat, convert.from_generate_response
        return convert.with_parsed(await self._ask(method, request, read, timeout_s, is_idempotent=False), chat)

    def chat_stream(
        self,
        messages: Sequence[AnyChatMessage],
        options: GenerationOptions | None = None,
        *,
        durable: bool = False,
        timeout_s: float | None = None,
        **chat: Unpack[ChatFields],
    ) -> AsyncStream:
        """Answers a conversation; the stream gives tokens as they come, with separate text, reasoning and calls. A
        durable stream outlives the server's processes."""
        request = convert.to_chat_request(generation_pb2.ChatStreamRequest(), messages, options, chat)
        return self._stream(self._stubs.generation.ChatStream, request, timeout_s, durable=durable)

    async def cancel(self, request_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a running request by its id. Raises NotFound if no such request runs."""
        request = convert.filled(generation_pb2.CancelRequest(), request_id=request_id)
        await self._ask(self._stubs.generation.Cancel, request, convert.from_nothing, timeout_s)

    async def tokenize(
        self,
        text_or_messages: str | Sequence[AnyChatMessage],
        *,
        add_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> Tokenization:
        """The token ids of a text or a conversation, as `generate` and `chat` would see them."""
        request = convert.to_tokenize_request(text_or_messages, add_special_tokens=add_special_tokens, model=model)
        return await self._ask(self._stubs.generation.Tokenize, request, convert.from_tokenize_response, timeout_s)

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
        return await self._ask(self._stubs.generation.Detokenize, request, convert.from_detokenize_response, timeout_s)

    async def embed(
        self,
        texts: str | Sequence[str] | Sequence[Sequence[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool | None = None,
        model: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """The vectors of a text, or of at most 2,048 texts or lists of token ids."""
        fields = {"dimensions": dimensions, "prompt_name": prompt_name, "truncate": truncate, "priority": priority}
        request = convert.to_embed_request(texts, model=model, **fields)
        return await self._ask(self._stubs.embeddings.Embed, request, convert.from_embed_response, timeout_s)

    async def embed_stream(
        self,
        batches: AsyncBatches,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool | None = None,
        model: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Embeddings]:
        """The vectors of any number of texts, in their order; batches are read as the server has room for them. If it
        raises, the vectors that came are good: another call may begin with the next text."""
        fields = {"dimensions": dimensions, "prompt_name": prompt_name, "truncate": truncate, "priority": priority}
        make = partial(convert.to_embed_stream_request, model=model, **fields)
        failures: list[Exception] = []
        with cancelled_once(self._is_closed):
            answers = self._stubs.embeddings.EmbedStream(
                async_requests_of(batches, make, failures), timeout=CallTime.of(timeout_s).left_s()
            )
        try:
            while True:
                try:
                    response = await async_next_response(answers)
                except StopAsyncIteration:
                    break
                yield convert.from_embed_response(response)
        finally:
            answers.cancel()
        if failures:
            raise failures[0]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool | None = None,
        model: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Ranking:
        """The best `top_n` of at most 2,048 documents for a query, or all in order."""
        fields = {"query": query, "documents": documents, "top_n": top_n, "truncate": truncate}
        request = convert.given(embedding_pb2.RerankRequest(), **fields, model=model, priority=priority)
        return await self._ask(self._stubs.embeddings.Rerank, request, convert.from_rerank_response, timeout_s)

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate: bool | None = None,
        model: str | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """The scores of pairs: one text with each of several, or two sequences of one length."""
        fields = {"text_1": text_1, "text_2": text_2, "truncate": truncate}
        request = convert.given(embedding_pb2.ScoreRequest(), **fields, model=model, priority=priority)
        return await self._ask(self._stubs.embeddings.Score, request, convert.from_score_response, timeout_s)

    async def pin_prefix(
        self,
        prefix: str | Sequence[int] | Sequence[AnyChatMessage],
        *,
        time_to_live_ms: int | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> PinnedPrefix:
        """Keeps a text, token ids or the start of a conversation cached for a while; a repeated pin renews its time."""
        request = convert.to_pin_request(prefix, time_to_live_ms=time_to_live_ms, model=model)
        return await self._ask(self._stubs.prefixes.PinPrefix, request, convert.from_pin_response, timeout_s)

    async def unpin_prefix(self, pin_id: str, *, timeout_s: float | None = None) -> None:
        """Ends a pin. Raises NotFound if no scheduler has it (any more)."""
        request = convert.filled(prefix_pb2.UnpinPrefixRequest(), pin_id=pin_id)
        await self._ask(self._stubs.prefixes.UnpinPrefix, request, convert.from_nothing, timeout_s)

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """All models served here."""
        return await self._ask(
            self._stubs.models.ListModels, model_pb2.ListModelsRequest(), convert.from_models, timeout_s
        )

    async def get_model(self, name: str, *, timeout_s: float | None = None) -> Model:
        """One model. Raises NotFound if it is not served here."""
        request = convert.filled(model_pb2.GetModelRequest(), model=name)
        return await self._ask(self._stubs.models.GetModel, request, convert.from_get_model_response, timeout_s)

    async def load_adapter(
        self, name: str, directory: str | Path, *, replace: bool = False, timeout_s: float | None = None
    ) -> Adapter:
        """Serves the LoRA adapter in a directory of the server under a name, which `model` of a request then chooses;
        for the API keys of operators. With `replace` it replaces an adapter of that name, which earlier requests keep.
        Raises AlreadyExists if the name is taken, InvalidArgument if the adapter cannot be used."""
        request = convert.filled(model_pb2.LoadAdapterRequest(replace=replace), name=name, directory=str(directory))
        method, read = self._stubs.models.LoadAdapter, convert.from_load_adapter_response
        return await self._ask(method, request, read, timeout_s, is_idempotent=False)

    async def unload_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Removes an adapter's name; running requests continue. Raises NotFound if no adapter has it."""
        request = convert.filled(model_pb2.UnloadAdapterRequest(), name=name)
        method = self._stubs.models.UnloadAdapter
        await self._ask(method, request, convert.from_nothing, timeout_s, is_idempotent=False)

    async def list_adapters(self, *, timeout_s: float | None = None) -> tuple[Adapter, ...]:
        """All adapters that the caller may use, in the order in which they were loaded."""
        request = model_pb2.ListAdaptersRequest()
        return await self._ask(self._stubs.models.ListAdapters, request, convert.from_adapters, timeout_s)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """The gateway's version, limits and replicas."""
        return await self._ask(
            self._stubs.models.GetServerInfo, model_pb2.GetServerInfoRequest(), convert.from_server_info, timeout_s
        )

    async def _ask(
        self,
        method: Callable[..., Any],
        request: Any,
        read: Callable[[Any], Answer],
        timeout_s: float | None,
        *,
        is_idempotent: bool = True,
    ) -> Answer:
        attempts = Attempts(self._retry, CallTime.of(timeout_s), is_idempotent)
        while True:
            try:
                with cancelled_once(self._is_closed):
                    response = await async_call(method, request, attempts.time.left_s())
            except QuireError as error:
                delay_s = attempts.delay_after(error)
            else:
                return read(response)
            await self._is_closed.wait(delay_s)
            # A thread that waits may run before the one that closes the client has closed its channel.
            if self._is_closed.is_set():
                raise client_closed()

    def _stream(
        self,
        method: Callable[..., Any],
        request: generation_pb2.GenerateStreamRequest | generation_pb2.ChatStreamRequest,
        timeout_s: float | None,
        *,
        durable: bool,
    ) -> AsyncStream:
        attempts = Attempts(self._retry, CallTime.of(timeout_s), is_idempotent=False)
        resume_stream = self._stubs.generation.ResumeStream if durable else None
        stream = AsyncStream(make_recovery(method, request, resume_stream, attempts), self._is_closed)
        with self._lock:
            self._streams[stream] = None
            is_closed = self._is_closed.is_set()
        if is_closed:
            stream.cut()
        return stream
