"""Quire's own gRPC API, which every gateway serves: the services of quire.gateway.v1, implemented by the generator. The
protos specify each method."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import grpc.aio

from gateway.api.front import Front, FrontContext
from gateway.api.grpc.embedding_servicer import EmbeddingServicer
from gateway.api.grpc.gateway_messages import (
    FEW_TOKENS,
    client_offsets,
    generated_response,
    limits_message,
    options_of_chat,
    options_of_generate,
    prompt_of,
    replica_message,
    stream_response,
    tokenized_response,
)
from gateway.auth.caller import current_caller
from gateway.replicas.events import Event
from gateway.replicas.live import LiveRequest
from gateway.request.adapter_names import ServedAdapter
from gateway.request.answer_memory import AS_MESSAGE, STREAMED
from gateway.request.generator import REFUSAL_S, Generator, Result, answer, answer_event
from gateway.request.models import Models
from gateway.request.text_service import TextService
from gateway.types import RequestOptions, optional
from quire.gateway.v1 import embedding_pb2, model_pb2, prefix_pb2
from quire.gateway.v1 import generation_pb2 as pb
from quire.gateway.v1.prefix_pb2 import PinPrefixRequest, PinPrefixResponse, UnpinPrefixRequest, UnpinPrefixResponse
from quire.rpc.interceptors import REQUEST_ID_HEADER
from quire.version import VERSION

Context = grpc.aio.ServicerContext
Response = TypeVar("Response", pb.GenerateResponse, pb.ChatResponse)
StreamResponse = TypeVar("StreamResponse", pb.GenerateStreamResponse, pb.ChatStreamResponse, pb.ResumeStreamResponse)
# The time for which calls that only need information wait for a first scheduler.
_PATIENCE_S = 2.0


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    models = context.models
    texts = TextService(models)
    services = {
        pb.DESCRIPTOR.services_by_name["GenerationService"]: GenerationServicer(models, texts),
        model_pb2.DESCRIPTOR.services_by_name["ModelService"]: ModelServicer(models, context.gateway_id),
        prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"]: PrefixServicer(texts),
        embedding_pb2.DESCRIPTOR.services_by_name["EmbeddingService"]: EmbeddingServicer(models),
    }
    return Front(servicers=services)


class GenerationServicer:
    def __init__(self, models: Models, texts: TextService) -> None:
        self._models = models
        self._texts = texts

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        return await self._respond(pb.GenerateResponse, options_of_generate(request))

    async def GenerateStream(
        self, request: pb.GenerateStreamRequest, context: Context
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        async with aclosing(
            self._stream(pb.GenerateStreamResponse, options_of_generate(request), context)
        ) as responses:
            async for response in responses:
                yield response

    async def Chat(self, request: pb.ChatRequest, context: Context) -> pb.ChatResponse:
        return await self._respond(pb.ChatResponse, options_of_chat(request))

    async def ChatStream(self, request: pb.ChatStreamRequest, context: Context) -> AsyncIterator[pb.ChatStreamResponse]:
        async with aclosing(self._stream(pb.ChatStreamResponse, options_of_chat(request), context)) as responses:
            async for response in responses:
                yield response

    async def ResumeStream(
        self, request: pb.ResumeStreamRequest, context: Context
    ) -> AsyncIterator[pb.ResumeStreamResponse]:
        generator = await self._models.holding(request.request_id)
        async with generator.resume(request.request_id, client_offsets(request)) as live:
            await context.send_initial_metadata(((REQUEST_ID_HEADER, request.request_id),))
            async for response in _responses(pb.ResumeStreamResponse, generator.name_of(live), live, live.events()):
                yield response

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        await self._models.cancel(request.request_id)
        return pb.CancelResponse()

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        tokenized = await self._texts.tokenize(
            optional(request, "model"),
            prompt_of(request, "input"),
            add_special_tokens=request.add_special_tokens or not request.HasField("add_special_tokens"),
        )
        if len(tokenized.token_ids) <= FEW_TOKENS:
            return tokenized_response(tokenized)
        return await asyncio.to_thread(tokenized_response, tokenized)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        text = await self._texts.detokenize(
            optional(request, "model"), request.token_ids, include_special_tokens=request.include_special_tokens
        )
        return pb.DetokenizeResponse(text=text)

    async def _respond(self, kind: type[Response], options: RequestOptions) -> Response:
        generator = self._models.of(options.model, options.kind)
        with generator.call_memory(AS_MESSAGE) as memory:
            async with generator.run(options, memory=memory) as live:
                return await answer([live], partial(_whole, kind, generator.name_of(live), live))

    async def _stream(
        self, kind: type[StreamResponse], options: RequestOptions, context: Context
    ) -> AsyncGenerator[StreamResponse, None]:
        generator = self._models.of(options.model, options.kind)
        with generator.call_memory(STREAMED) as memory:
            async with generator.run(options, memory=memory) as live:
                if options.durable:
                    await context.send_initial_metadata(((REQUEST_ID_HEADER, live.request.request_id),))
                    events = live.events()
                else:
                    events = _with_headers(live.events(), context)
                async for response in _responses(kind, generator.name_of(live), live, events):
                    yield response


def _whole(kind: type[Response], name: str, live: LiveRequest, results: Sequence[Result]) -> Response:
    ((sequences, usage),) = results
    return generated_response(kind, live.request.request_id, name, sequences, usage, live.prompt_logprobs)


async def _responses(
    kind: type[StreamResponse], name: str, live: LiveRequest, events: AsyncIterator[Event]
) -> AsyncIterator[StreamResponse]:
    request_id = live.request.request_id
    async for event in events:
        make = partial(stream_response, kind, request_id, name, event)
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
    def __init__(self, models: Models, gateway_id: str) -> None:
        self._models = models
        self._gateway_id = gateway_id

    async def ListModels(self, request: model_pb2.ListModelsRequest, context: Context) -> model_pb2.ListModelsResponse:
        caller = current_caller()
        named = [(each, name) for each in self._models for name in each.adapters.names(caller)]
        return model_pb2.ListModelsResponse(models=[await _described(*each) for each in named])

    async def GetModel(self, request: model_pb2.GetModelRequest, context: Context) -> model_pb2.GetModelResponse:
        return model_pb2.GetModelResponse(model=await _described(self._models.named(request.model), request.model))

    async def LoadAdapter(
        self, request: model_pb2.LoadAdapterRequest, context: Context
    ) -> model_pb2.LoadAdapterResponse:
        generator = self._models.for_adapter(request.name, "name")
        served = await generator.adapters.load(
            request.name,
            request.directory,
            replace=request.replace,
            name_field="name",
            directory_field="directory",
        )
        return model_pb2.LoadAdapterResponse(adapter=_adapter(generator, served))

    async def UnloadAdapter(
        self, request: model_pb2.UnloadAdapterRequest, context: Context
    ) -> model_pb2.UnloadAdapterResponse:
        self._models.with_adapter(request.name).adapters.unload(request.name, name_field="name")
        return model_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: model_pb2.ListAdaptersRequest, context: Context
    ) -> model_pb2.ListAdaptersResponse:
        caller = current_caller()
        adapters = [_adapter(each, served) for each in self._models for served in each.adapters.listed(caller)]
        return model_pb2.ListAdaptersResponse(adapters=adapters)

    async def GetServerInfo(
        self, request: model_pb2.GetServerInfoRequest, context: Context
    ) -> model_pb2.GetServerInfoResponse:
        limits = await self._models.default.limits(_PATIENCE_S)
        return model_pb2.GetServerInfoResponse(
            version=VERSION,
            gateway_id=self._gateway_id,
            replicas=self._replicas() if current_caller().access.is_operator else [],
            limits=limits_message(limits),
        )

    def _replicas(self) -> list[model_pb2.Replica]:
        return [
            replica_message(address, each.model.name, link.is_connected, link.welcome, link.loading)
            for each in self._models
            for address, link in each.replicas.links.items()
        ]


def _adapter(generator: Generator, served: ServedAdapter) -> model_pb2.Adapter:
    named = served.named
    return model_pb2.Adapter(
        name=named.name,
        parent=generator.model.name,
        digest=named.digest.hex(),
        rank=served.rank,
        directory=named.directory if current_caller().access.is_operator else "",
    )


async def _described(generator: Generator, name: str) -> model_pb2.Model:
    limits, model = await generator.limits(_PATIENCE_S), generator.model
    welcome = generator.replicas.welcomes[0]
    return model_pb2.Model(
        name=name,
        architecture=model.architecture,
        dtype=welcome.dtype,
        vocab_size=limits.vocab_size,
        max_model_len=limits.shown_model_len,
        eos_token_ids=model.eos_token_ids,
        has_chat_template=model.chat.template is not None,
        parent=generator.adapters.parent_of(name),
    )


class PrefixServicer:
    def __init__(self, texts: TextService) -> None:
        self._texts = texts

    async def PinPrefix(self, request: PinPrefixRequest, context: Context) -> PinPrefixResponse:
        pin = await self._texts.pin(
            optional(request, "model"),
            prompt_of(request, "prefix"),
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
