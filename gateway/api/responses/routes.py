"""The paths of OpenAI's Responses API: make, get, delete and cancel a response."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.answers import OPENAI, ErrorAnswer, as_json
from gateway.api.body import BodyLimits, read_body, validated
from gateway.api.durable_streams import FrontEnd, last_event_id
from gateway.api.event_shapes import ResponseEvent
from gateway.api.fields import Conversation
from gateway.api.openapi import ApiRoute
from gateway.api.respond import respond, resumed
from gateway.api.responses.items import input_items, item_page
from gateway.api.responses.read import (
    ITEM,
    InputBody,
    ResponseBody,
    conversation_of,
    options_of,
    param_name,
    parse_body,
    prompt_of,
    references,
)
from gateway.api.responses.store import ResponseStore, StoredResponse, message_of, plain_message
from gateway.api.responses.write import ResponseHead, ResponseShaper, cancelled_response
from gateway.api.shapes import CancelledResponse, DeletedResponse, InputItems, InputTokens, ResponseObject
from gateway.auth.caller import current_caller
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import STREAMED_AND_REPEATED
from gateway.request.generator import Generator
from gateway.request.text_service import TextService
from gateway.types import ChatMessage, RequestOptions
from quire import clock, entropy

_API = "responses"
_ID_PREFIX = "resp_"
_PATH = "/v1/responses/{response_id}"


class ResponseCall:
    """One response. See gateway.api.respond.Call. Its id is the id of its request, by which it can be cancelled."""

    shows_prompt_by_choice = False
    stream_form = STREAMED_AND_REPEATED

    def __init__(self, body: ResponseBody, model: str, store: ResponseStore, conversation: Conversation) -> None:
        """A response that this gateway cannot store says so: its `store` is false."""
        self.id = f"{_ID_PREFIX}{entropy.random_hex(16)}"
        self.streams = bool(body.stream)
        self._tenant = current_caller().tenant
        self._body = body
        self._store = store
        self._head = ResponseHead(self.id, int(clock.unix_s()), model, store.keeps_any and body.store is not False)
        self._shaper: ResponseShaper | None = None
        self._conversation = conversation
        self._stored: StoredResponse | None = None
        self.dialect = dataclasses.replace(OPENAI, names_events=True, error_event=self._error_event)

    @classmethod
    def read_back(cls, live: LiveRequest, store: ResponseStore) -> Self:
        """The call that began a durable stream. Raises NotFound if it was of another API."""
        kept = FrontEnd.of(live.request.front_end, _API, live.request.request_id)
        conversation = Conversation([message_of(each) for each in kept.more["messages"]])
        call = cls(validated(ResponseBody, kept.body, {}), kept.model, store, conversation)
        call.id, call._head = kept.id, dataclasses.replace(call._head, id=kept.id, created=kept.created)
        return call

    def _front_end(self) -> bytes:
        if not self._body.durable:
            return b""
        fields = self._body.model_dump(mode="json", by_alias=True, exclude_unset=True) | {"input": []}
        more = {"messages": [plain_message(each) for each in self._conversation.messages] if self._is_stored else []}
        return FrontEnd(_API, self.id, self._head.created, self._head.model, fields, more).to_bytes()

    @property
    def _is_stored(self) -> bool:
        return self._head.is_stored

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        options = options_of(self._body, self._conversation.prompt, self.id)
        return [dataclasses.replace(options, durable=bool(self._body.durable), front_end=self._front_end())]

    def param_name(self, position: int, field: str) -> str:
        return param_name(self._conversation, field)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> ResponseShaper:
        texts = generator.model.tokenizer.token_texts
        self._shaper = ResponseShaper(self._head, self._body, live[0], texts, self._keep)
        return self._shaper

    def _keep(self, response: Mapping[str, Any], answer: ChatMessage) -> None:
        if self._is_stored:
            self._stored = StoredResponse(as_json(response), (*self._conversation.messages, answer))

    async def keep(self) -> None:
        if self._stored is not None:
            await self._store.run(self._store.add, self._tenant, self.id, self._stored)

    def _error_event(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        assert self._shaper is not None, "a stream begins with what the shaper writes"
        return self._shaper.error_event(answer)


def response_routes(
    generator: Generator, body_limits: BodyLimits, *, store: ResponseStore, keep_alive_s: float
) -> list[ApiRoute]:
    """Responses are kept in `store`. `keep_alive_s` is the longest silence of a stream; 0 sets no limit."""
    model, texts = generator.model.name, TextService(generator)

    async def continued(body: InputBody) -> Conversation:
        """The conversation of a body, with what it refers to. Raises InvalidArgument if that is not kept."""
        tenant = current_caller().tenant
        earlier = await store.run(store.earlier_messages, tenant, body.previous_response_id)
        items: dict[str, Any] = {}
        if asked := references(body):
            items = await store.run(store.items, tenant, asked)
        return conversation_of(body, earlier, {name: ITEM.validate_python(item) for name, item in items.items()})

    async def create(request: Request) -> Response:
        """Makes a response: answers a text, or a conversation of items."""
        if (last := last_event_id(request)) is not None:
            read_back = partial(ResponseCall.read_back, store=store)
            return resumed(generator, last, read_back, keep_alive_s, dataclasses.replace(OPENAI, names_events=True))
        body = await parse_body(ResponseBody, await read_body(request, body_limits), body_limits)
        call = ResponseCall(body, body.model or model, store, await continued(body))
        return respond(generator, call, keep_alive_s)

    async def retrieve(request: Request) -> Response:
        """A stored response of this gateway."""
        found = await store.run(store.find, current_caller().tenant, request.path_params["response_id"])
        return Response(found.body, media_type="application/json")

    async def delete(request: Request) -> Response:
        """Deletes a stored response."""
        response_id = request.path_params["response_id"]
        await store.run(store.remove, current_caller().tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        """Ends a running response of any gateway. A finished response is not changed."""
        response_id, tenant = request.path_params["response_id"], current_caller().tenant
        if (ended := await store.run(store.get, tenant, response_id)) is not None:
            return Response(ended.body, media_type="application/json")
        if not response_id.startswith(_ID_PREFIX):
            await store.run(store.find, tenant, response_id)
        await generator.cancel(response_id)
        return JSONResponse(cancelled_response(ResponseHead(response_id, int(clock.unix_s()), model)))

    async def list_input_items(request: Request) -> Response:
        """The items that a response answers, those of earlier turns included, the last one first."""
        response_id = request.path_params["response_id"]
        # Its last message is the answer.
        asked = (await store.run(store.find, current_caller().tenant, response_id)).messages[:-1]
        return JSONResponse(item_page(input_items(response_id, asked), request.query_params))

    async def count_input_tokens(request: Request) -> Response:
        """The number of tokens of the prompt that a response would have."""
        body = await parse_body(InputBody, await read_body(request, body_limits), body_limits)
        conversation = await continued(body)
        prompt = prompt_of(body, conversation.prompt)
        count = await texts.count_tokens(body.model or None, prompt, partial(param_name, conversation))
        return JSONResponse({"object": "response.input_tokens", "input_tokens": count})

    return [
        ApiRoute(
            "/v1/responses",
            create,
            method="POST",
            body=ResponseBody,
            answer=ResponseObject,
            events=ResponseEvent,
            names_events=True,
        ),
        # Before the path of any response.
        ApiRoute("/v1/responses/input_tokens", count_input_tokens, method="POST", body=InputBody, answer=InputTokens),
        ApiRoute(_PATH, retrieve, answer=ResponseObject),
        ApiRoute(_PATH, delete, method="DELETE", answer=DeletedResponse),
        ApiRoute(f"{_PATH}/cancel", cancel, method="POST", answer=ResponseObject | CancelledResponse),
        ApiRoute(f"{_PATH}/input_items", list_input_items, answer=InputItems),
    ]
