"""The paths of OpenAI's Responses API: make, get, delete and cancel a response."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.answers import OPENAI, ErrorAnswer, as_json
from gateway.api.body import BodyLimits, read_body
from gateway.api.event_shapes import ResponseEvent
from gateway.api.openapi import ApiRoute
from gateway.api.respond import respond
from gateway.api.responses.items import input_items, item_page
from gateway.api.responses.read import (
    InputBody,
    ResponseBody,
    conversation_of,
    options_of,
    param_name,
    parse_body,
    prompt_of,
)
from gateway.api.responses.store import ResponseStore, StoredResponse
from gateway.api.responses.write import ResponseHead, ResponseShaper, cancelled_response
from gateway.api.shapes import CancelledResponse, DeletedResponse, InputItems, InputTokens, ResponseObject
from gateway.auth.caller import current_caller
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import STREAMED_AND_REPEATED
from gateway.request.generator import Generator
from gateway.request.text_service import TextService
from gateway.types import ChatMessage, RequestOptions
from quire import clock, entropy
from quire.rpc.errors import invalid_field

_ID_PREFIX = "resp_"
_PATH = "/v1/responses/{response_id}"


class ResponseCall:
    """One response. See gateway.api.respond.Call. Its id is the id of its request, by which it can be cancelled."""

    shows_prompt_by_choice = False
    stream_form = STREAMED_AND_REPEATED

    def __init__(self, body: ResponseBody, model: str, store: ResponseStore) -> None:
        """Raises InvalidArgument if it is to be stored and this gateway stores none, or if it continues a response that
        this gateway does not have."""
        if body.store and not store.keeps_any:
            raise invalid_field(
                "store",
                "is true; this gateway keeps no responses, unless it is started with --max-stored-response-bytes",
            )
        self.id = f"{_ID_PREFIX}{entropy.random_hex(16)}"
        self.streams = bool(body.stream)
        self._tenant = current_caller().tenant
        self._body = body
        self._store = store
        self._head = ResponseHead(self.id, int(clock.unix_s()), model, store.keeps_any and body.store is not False)
        self._shaper: ResponseShaper | None = None
        self._conversation = conversation_of(body, store.earlier_messages(self._tenant, body.previous_response_id))
        self.dialect = dataclasses.replace(OPENAI, names_events=True, error_event=self._error_event)

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        return [options_of(self._body, self._conversation.prompt, self.id)]

    def param_name(self, position: int, field: str) -> str:
        return param_name(self._conversation, field)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> ResponseShaper:
        texts = generator.model.tokenizer.token_texts
        self._shaper = ResponseShaper(self._head, self._body, live[0], texts, self._keep)
        return self._shaper

    def _keep(self, response: Mapping[str, Any], answer: ChatMessage) -> None:
        if self._head.is_stored:
            messages = (*self._conversation.messages, answer)
            self._store.add(self._tenant, self.id, StoredResponse(as_json(response), messages))

    def _error_event(self, answer: ErrorAnswer) -> Mapping[str, Any]:
        assert self._shaper is not None, "a stream begins with what the shaper writes"
        return self._shaper.error_event(answer)


def response_routes(
    generator: Generator, body_limits: BodyLimits, *, max_stored_bytes: int, keep_alive_s: float
) -> list[ApiRoute]:
    """At most `max_stored_bytes` of responses are kept; 0 keeps none. `keep_alive_s` is the longest silence of a
    stream; 0 sets no limit."""
    model, texts = generator.model.name, TextService(generator)
    store = ResponseStore(max_stored_bytes)

    async def create(request: Request) -> Response:
        """Makes a response: answers a text, or a conversation of items."""
        body = await parse_body(ResponseBody, await read_body(request, body_limits), body_limits)
        return respond(generator, ResponseCall(body, body.model or model, store), keep_alive_s)

    async def retrieve(request: Request) -> Response:
        """A stored response of this gateway."""
        found = store.find(current_caller().tenant, request.path_params["response_id"])
        return Response(found.body, media_type="application/json")

    async def delete(request: Request) -> Response:
        """Deletes a stored response."""
        response_id = request.path_params["response_id"]
        store.remove(current_caller().tenant, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def cancel(request: Request) -> Response:
        """Ends a running response of any gateway. A finished response is not changed."""
        response_id, tenant = request.path_params["response_id"], current_caller().tenant
        if (ended := store.get(tenant, response_id)) is not None:
            return Response(ended.body, media_type="application/json")
        if not response_id.startswith(_ID_PREFIX):
            store.find(tenant, response_id)
        await generator.cancel(response_id)
        return JSONResponse(cancelled_response(ResponseHead(response_id, int(clock.unix_s()), model)))

    async def list_input_items(request: Request) -> Response:
        """The items that a response answers, those of earlier turns included, the last one first."""
        response_id = request.path_params["response_id"]
        # Its last message is the answer.
        asked = store.find(current_caller().tenant, response_id).messages[:-1]
        return JSONResponse(item_page(input_items(response_id, asked), request.query_params))

    async def count_input_tokens(request: Request) -> Response:
        """The number of tokens of the prompt that a response would have."""
        body = await parse_body(InputBody, await read_body(request, body_limits), body_limits)
        earlier = store.earlier_messages(current_caller().tenant, body.previous_response_id)
        conversation = conversation_of(body, earlier)
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
