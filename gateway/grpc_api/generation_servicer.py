"""quire.gateway.v1.GenerationService over the generator."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TypeVar

import grpc.aio

from gateway.grpc_api import convert
from gateway.replicas.events import Event
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import AS_MESSAGE, STREAMED
from gateway.request.generator import Generator
from gateway.request.prompts import TextService
from gateway.request.running import REFUSAL_S, Result, answer, answer_event
from gateway.request.types import RequestOptions
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

REQUEST_ID_HEADER = "quire-request-id"
Context = grpc.aio.ServicerContext
Response = TypeVar("Response", GenerateResponse, ChatResponse)
StreamResponse = TypeVar("StreamResponse", GenerateStreamResponse, ChatStreamResponse, ResumeStreamResponse)


class GenerationServicer:
    """See protos/quire/gateway/v1/generation.proto for what each method promises."""

    def __init__(self, generator: Generator, texts: TextService) -> None:
        self._generator = generator
        self._texts = texts
        self._model_name = generator.model.name

    async def Generate(self, request: GenerateRequest, context: Context) -> GenerateResponse:
        return await self._respond(GenerateResponse, convert.options_of_generate(request))

    async def GenerateStream(
        self, request: GenerateStreamRequest, context: Context
    ) -> AsyncIterator[GenerateStreamResponse]:
        async with aclosing(
            self._stream(GenerateStreamResponse, convert.options_of_generate(request), context)
        ) as responses:
            async for response in responses:
                yield response

    async def Chat(self, request: ChatRequest, context: Context) -> ChatResponse:
        return await self._respond(ChatResponse, convert.options_of_chat(request))

    async def ChatStream(self, request: ChatStreamRequest, context: Context) -> AsyncIterator[ChatStreamResponse]:
        async with aclosing(self._stream(ChatStreamResponse, convert.options_of_chat(request), context)) as responses:
            async for response in responses:
                yield response

    async def ResumeStream(self, request: ResumeStreamRequest, context: Context) -> AsyncIterator[ResumeStreamResponse]:
        async with self._generator.resume(request.request_id, convert.client_offsets(request)) as live:
            async for response in self._responses(ResumeStreamResponse, live, _with_headers(live.events(), context)):
                yield response

    async def Cancel(self, request: CancelRequest, context: Context) -> CancelResponse:
        await self._generator.cancel(request.request_id)
        return CancelResponse()

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        tokenized = await self._texts.tokenize(
            convert.optional(request, "model"),
            convert.tokenize_input(request),
            add_special_tokens=request.add_special_tokens or not request.HasField("add_special_tokens"),
        )
        if len(tokenized.token_ids) <= convert.FEW_TOKENS:
            return convert.tokenized_response(tokenized)
        return await asyncio.to_thread(convert.tokenized_response, tokenized)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        text = await self._texts.detokenize(
            convert.optional(request, "model"),
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
        return convert.generated_response(
            kind, live.request.request_id, self._model_name, sequences, usage, live.prompt_logprobs
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
        request_id = live.request.request_id
        async for event in events:
            make = partial(convert.stream_response, kind, request_id, self._model_name, event)
            yield await answer_event(live, event, make)


async def _with_headers(events: AsyncIterator[Event], context: Context) -> AsyncIterator[Event]:
    """The events, all of them. Where the first one takes a while, the call's headers go out before it: proxies wait for
    those. Not at once, since clients call again by themselves only as long as they have no headers."""
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
