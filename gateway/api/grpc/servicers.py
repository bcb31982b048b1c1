"""The services of quire.gateway.v1, implemented by the generator. The protos specify each method."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import grpc.aio

from gateway.api.grpc import gateway_messages
from gateway.auth.caller import current_caller
from gateway.replicas.events import Event
from gateway.replicas.live import LiveRequest
from gateway.request.adapter_names import ServedAdapter
from gateway.request.answer_memory import AS_MESSAGE, STREAMED
from gateway.request.generator import REFUSAL_S, Generator, Result, answer, answer_event
from gateway.request.text_service import TextService
from gateway.request.validation import check_model
from gateway.types import RequestOptions, optional
from quire.gateway.v1.generation_pb2 import (
    CancelRequest,
    CancelResponse,
    ChatRequest,
    ChatResponse,
    ChatStreamRequest,
    ChatStreamResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamRequest,
    GenerateStreamResponse,
    ResumeStreamRequest,
    ResumeStreamResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from quire.gateway.v1.model_pb2 import (
    Adapter,
    GetModelRequest,
    GetModelResponse,
    GetServerInfoRequest,
    GetServerInfoResponse,
    ListAdaptersRequest,
    ListAdaptersResponse,
    ListModelsRequest,
    ListModelsResponse,
    LoadAdapterRequest,
    LoadAdapterResponse,
    Model,
    Replica,
    UnloadAdapterRequest,
    UnloadAdapterResponse,
)
from quire.gateway.v1.prefix_pb2 import PinPrefixRequest, PinPrefixResponse, UnpinPrefixRequest, UnpinPrefixResponse
from quire.rpc.errors import NotFound
from quire.rpc.interceptors import REQUEST_ID_HEADER
from quire.version import VERSION

Context = grpc.aio.ServicerContext
Response = TypeVar("Response", GenerateResponse, ChatResponse)
StreamResponse = TypeVar("StreamResponse", GenerateStreamResponse, ChatStreamResponse, ResumeStreamResponse)
# The time for which calls that only need information wait for a first scheduler.
_PATIENCE_S = 2.0


class GenerationServicer:
    def __init__(self, generator: Generator, texts: TextService) -> None:
        self._generator = generator
        self._texts = texts

    async def Generate(self, request: GenerateRequest, context: Context) -> GenerateResponse:
        return await self._respond(GenerateResponse, gateway_messages.options_of_generate(request))

    async def GenerateStream(
        self, request: GenerateStreamRequest, context: Context
    ) -> AsyncIterator[GenerateStreamResponse]:
        async with aclosing(
            self._stream(GenerateStreamResponse, gateway_messages.options_of_generate(request), context)
        ) as responses:
            async for response in responses:
                yield response

    async def Chat(self, request: ChatRequest, context: Context) -> ChatResponse:
        return await self._respond(ChatResponse, gateway_messages.options_of_chat(request))

    async def ChatStream(self, request: ChatStreamRequest, context: Context) -> AsyncIterator[ChatStreamResponse]:
        async with aclosing(
            self._stream(ChatStreamResponse, gateway_messages.options_of_chat(request), context)
        ) as responses:
            async for response in responses:
                yield response

    async def ResumeStream(self, request: ResumeStreamRequest, context: Context) -> AsyncIterator[ResumeStreamResponse]:
        async with self._generator.resume(request.request_id, gateway_messages.client_offsets(request)) as live:
            await context.send_initial_metadata(((REQUEST_ID_HEADER, request.request_id),))
            async for response in self._responses(ResumeStreamResponse, live, live.events()):
                yield response

    async def Cancel(self, request: CancelRequest, context: Context) -> CancelResponse:
        await self._generator.cancel(request.request_id)
        return CancelResponse()

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        tokenized = await self._texts.tokenize(
            optional(request, "model"),
            gateway_messages.prompt_of(request, "input"),
            add_special_tokens=request.add_special_tokens or not request.HasField("add_special_tokens"),
        )
        if len(tokenized.token_ids) <= gateway_messages.FEW_TOKENS:
            return gateway_messages.tokenized_response(tokenized)
        return await asyncio.to_thread(gateway_messages.tokenized_response, tokenized)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        text = await self._texts.detokenize(
            optional(request, "model"),
            request.token_ids,
            include_special_tokens=request.include_special_tokens,
        )
        return DetokenizeResponse(text=text)

    async def _respond(self, kind: type[Response], options: RequestOptions) -> Response:
        with self._generator.call_memory(AS_MESSAGE) as memory:
            async with self._generator.run(options, memory=memory) as live:
                return await answer([live], partial(self._whole, kind, live))

    def _whole(self, kind: type[Response], live: LiveRequest, results: Sequence[Result]) -> Response:
        ((sequences, usage),) = results
        return gateway_messages.generated_response(
            kind, live.request.request_id, self._generator.name_of(live), sequences, usage, live.prompt_logprobs
        )

    async def _stream(
        self, kind: type[StreamResponse], options: RequestOptions, context: Context
    ) -> AsyncGenerator[StreamResponse, None]:
        with self._generator.call_memory(STREAMED) as memory:
            async with self._generator.run(options, memory=memory) as live:
                if options.durable:
                    await context.send_initial_metadata(((REQUEST_ID_HEADER, live.request.request_id),))
                    events = live.events()
                else:
                    events = _with_headers(live.events(), context)
                async for response in self._responses(kind, live, events):
                    yield response

    async def _responses(
        self, kind: type[StreamResponse], live: LiveRequest, events: AsyncIterator[Event]
    ) -> AsyncIterator[StreamResponse]:
        request_id, name = live.request.request_id, self._generator.name_of(live)
        async for event in events:
            make = partial(gateway_messages.stream_response, kind, request_id, name, event)
            yield await answer_event(live, event, make)


async def _with_headers(events: AsyncIterator[Event], context: Context) -> AsyncIterator[Event]:
    """All events. If the first event takes long, the headers of the call are sent before it, since proxies wait for
    them. They are not sent at once, since clients retry automatically only until they get headers."""
    first = asyncio.ensure_future(anext(aiter(events), None))
    try:
        await asyncio.wait([first], timeout=REFUSAL_S)
        if not first.done():
            await context.send_initial_metadata(())
        event = await first
    finally:
        first.cancel()
    if event is not None:
        yield event
    async for event in events:
        yield event


class ModelServicer:
    def __init__(self, generator: Generator, gateway_id: str) -> None:
        self._generator = generator
        self._model = generator.model
        self._adapters = generator.adapters
        self._gateway_id = gateway_id

    async def ListModels(self, request: ListModelsRequest, context: Context) -> ListModelsResponse:
        names = self._adapters.names(current_caller())
        return ListModelsResponse(models=[await self._describe(name) for name in names])

    async def GetModel(self, request: GetModelRequest, context: Context) -> GetModelResponse:
        check_model(request.model, self._adapters.visible(current_caller(), request.model), NotFound)
        return GetModelResponse(model=await self._describe(request.model))

    async def LoadAdapter(self, request: LoadAdapterRequest, context: Context) -> LoadAdapterResponse:
        served = await self._adapters.load(
            request.name,
            request.directory,
            replace=request.replace,
            name_field="name",
            directory_field="directory",
        )
        return LoadAdapterResponse(adapter=self._adapter(served))

    async def UnloadAdapter(self, request: UnloadAdapterRequest, context: Context) -> UnloadAdapterResponse:
        self._adapters.unload(request.name, name_field="name")
        return UnloadAdapterResponse()

    async def ListAdapters(self, request: ListAdaptersRequest, context: Context) -> ListAdaptersResponse:
        return ListAdaptersResponse(adapters=map(self._adapter, self._adapters.listed(current_caller())))

    def _adapter(self, served: ServedAdapter) -> Adapter:
        named = served.named
        return Adapter(
            name=named.name,
            parent=self._model.name,
            digest=named.digest.hex(),
            rank=served.rank,
            directory=named.directory if current_caller().access.is_operator else "",
        )

    async def GetServerInfo(self, request: GetServerInfoRequest, context: Context) -> GetServerInfoResponse:
        limits = await self._generator.limits(_PATIENCE_S)
        return GetServerInfoResponse(
            version=VERSION,
            gateway_id=self._gateway_id,
            replicas=self._replicas() if current_caller().access.is_operator else [],
            limits=gateway_messages.limits_message(limits),
        )

    def _replicas(self) -> list[Replica]:
        return [
            gateway_messages.replica_message(address, link.is_connected, link.welcome, link.loading)
            for address, link in self._generator.replicas.links.items()
        ]

    async def _describe(self, name: str) -> Model:
        limits = await self._generator.limits(_PATIENCE_S)
        welcome = self._generator.replicas.welcomes[0]
        return Model(
            name=name,
            architecture=self._model.architecture,
            dtype=welcome.dtype,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            eos_token_ids=self._model.eos_token_ids,
            has_chat_template=self._model.chat.template is not None,
            parent=self._adapters.parent_of(name),
        )


class PrefixServicer:
    def __init__(self, texts: TextService) -> None:
        self._texts = texts

    async def PinPrefix(self, request: PinPrefixRequest, context: Context) -> PinPrefixResponse:
        pin = await self._texts.pin(
            optional(request, "model"),
            gateway_messages.prompt_of(request, "prefix"),
            optional(request, "time_to_live_ms"),
            timeout_s=context.time_remaining(),
        )
        return PinPrefixResponse(
            pin_id=pin.pin_id,
            pinned_tokens=pin.num_tokens,
            pinned_blocks=pin.num_blocks,
            time_to_live_ms=pin.time_to_live_ms,
        )

    async def UnpinPrefix(self, request: UnpinPrefixRequest, context: Context) -> UnpinPrefixResponse:
        await self._texts.unpin(request.pin_id, timeout_s=context.time_remaining())
        return UnpinPrefixResponse()
