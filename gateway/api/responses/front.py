"""OpenAI's Responses API: create, get, delete and cancel a response, which is stored or runs in the background."""

import dataclasses
import re
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.answers import HTTP_STATUSES, OPENAI, Dialect, StreamedResponse
from gateway.api.body import read_body
from gateway.api.fields import Conversation, parse
from gateway.api.front import Front, FrontContext
from gateway.api.openapi import ApiRoute
from gateway.api.respond import LAST_EVENT_ID, EventId, last_event_id, respond, resumed
from gateway.api.responses.answers import (
    CancelledResponse,
    CompactedResponse,
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.background_store import CANCELLED, BackgroundStore
from gateway.api.responses.calls import ID_PREFIX, CompactCall, ResponseCall, conversation_with
from gateway.api.responses.read_response import CompactBody, InputBody, ResponseBody, names_of, prompt_of
from gateway.api.responses.session import ResponseSession, SessionContext
from gateway.api.responses.store import ResponseStore, input_items, item_page, sqlite_path
from gateway.api.responses.write_response import ResponseHead, error_event, response_head
from gateway.api.websocket import WebSocket, WebSocketResponse
from gateway.auth.caller import current_caller
from gateway.request.generator import Generator
from gateway.request.text_service import TextService
from gateway.request.violations import renaming
from gateway.types import ModelKind
from quire.rpc.errors import InvalidArgument, Unavailable, invalid_field
from quire.runtime import clock

_PATH = "/v1/responses/{response_id}"


def open_front(context: FrontContext) -> Front:
    """Opens the front with its stores. Raises ConfigurationError if a store cannot be used."""
    path, max_bytes = sqlite_path(context.settings.response_store), context.settings.max_stored_response_bytes
    store = ResponseStore(path, max_bytes)
    background = BackgroundResponses(
        context.models,
        BackgroundStore(path, context.gateway_id, max_bytes),
        context.authenticator,
        partial(ResponseCall.of_kept, store=store),
    )

    async def read_call(data: bytes) -> tuple[Generator, ResponseCall]:
        body = await parse(ResponseBody, data, context.body_limits)
        generator = context.models.of(body.model, ModelKind.TEXT)
        conversation = await conversation_with(store, body)
        return generator, ResponseCall(body, body.model or generator.model.name, store, conversation)

    def close() -> None:
        store.close()
        background.close()

    routes = _ResponseRoutes(context, store, background)
    all_routes = [
        # Documents of OpenAPI cannot describe WebSockets, so for them the path refuses all requests.
        ApiRoute("/v1/responses", routes.connect, refuses=True, errors=[426, 503]),
        ApiRoute(
            "/v1/responses",
            routes.create,
            method="POST",
            body=ResponseBody,
            answer=ResponseObject,
            events=ResponseEvent,
            names_events=True,
        ),
        # Before the route with a response id, which would match this path, too.
        ApiRoute("/v1/responses/compact", routes.compact, method="POST", body=CompactBody, answer=CompactedResponse),
        ApiRoute("/v1/responses/input_tokens", routes.count_input_tokens, method="POST", body=InputBody),
        ApiRoute(
            _PATH,
            routes.retrieve,
            answer=ResponseObject | CancelledResponse,
            events=ResponseEvent,
            names_events=True,
            errors=HTTP_STATUSES,
        ),
        ApiRoute(_PATH, routes.delete, method="DELETE", errors=HTTP_STATUSES),
        ApiRoute(
            f"{_PATH}/cancel",
            routes.cancel,
            method="POST",
            answer=ResponseObject | CancelledResponse,
            errors=HTTP_STATUSES,
        ),
        ApiRoute(f"{_PATH}/input_items", routes.list_input_items),
    ]
    return Front(
        routes=all_routes,
        tasks={"background responses": background.run},
        stop_runs=routes.stop_runs,
        close=close,
        call_readers={"/v1/responses": read_call},
    )


class _ResponseRoutes:
    def __init__(self, context: FrontContext, store: ResponseStore, background: BackgroundResponses) -> None:
        self._models, self._texts = context.models, TextService(context.models)
        self._body_limits = context.body_limits
        self._store, self._background = store, background
        self._keep_alive_s = context.keep_alive_s
        self._sessions: set[ResponseSession] = set()
        self._session_context = SessionContext(
            context.models,
            context.authenticator,
            store,
            background,
            context.body_limits,
            context.keep_alive_s,
            context.settings.slow_sender_timeout,
            context.settings.websocket_idle_timeout,
        )

    async def connect(self, request: Request) -> Response:
        """Refused: a GET, unless it opens a WebSocket."""
        if self._models.is_draining:
            raise Unavailable("this gateway is about to stop; connect again", reason="DRAINING")
        return WebSocketResponse(self._serve, self._body_limits.max_bytes)

    async def _serve(self, socket: WebSocket) -> None:
        session = ResponseSession(self._session_context, socket)
        self._sessions.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)

    async def stop_runs(self) -> None:
        """Stops background responses, and ends WebSockets after their running responses."""
        for session in list(self._sessions):
            session.drain()
        await self._background.stop_runs()

    async def create(self, request: Request) -> Response:
        """Creates a response: answers a text or a conversation of items."""
        if (last := last_event_id(request)) is not None:
            if await self._background.get(current_caller().tenant, last.request_id) is not None:
                return self._events_of(last.request_id, last)
            read_back = partial(ResponseCall.read_back, store=self._store)
            return resumed(self._models, last, read_back, self._keep_alive_s, _dialect(last.number))
        body = await parse(ResponseBody, await read_body(request, self._body_limits), self._body_limits)
        generator = self._models.of(body.model, ModelKind.TEXT)
        conversation = await self._conversation_with(body)
        call = ResponseCall(body, body.model or generator.model.name, self._store, conversation)
        if not call.runs_in_background:
            return respond(generator, call, self._keep_alive_s)
        if not self._store.keeps_any:
            raise invalid_field(
                "background", "is true, but this gateway stores no responses (--max-stored-response-bytes is 0)"
            )
        state = await self._background.begin(call)
        return self._events_of(call.id) if call.streams else _json(state)

    async def _conversation_with(self, body: InputBody) -> Conversation:
        """The conversation of a body, with the items that it refers to. Raises InvalidArgument if one is not stored."""
        try:
            return await conversation_with(self._store, body)
        except InvalidArgument as error:
            name, earlier = "previous_response_id", body.previous_response_id
            if earlier is None or error.reason != "RESPONSE_NOT_FOUND" or error.violations[0].field != name:
                raise
            row = await self._background.get(current_caller().tenant, earlier)
            if row is None:
                raise
            way_out = "wait until it is completed" if row.is_running else "send the items of the earlier turns in input"
            description = f'is "{earlier:.80}", which is {row.status} and has no answer to continue from; {way_out}'
            raise invalid_field(name, description) from error

    def _events_of(self, response_id: str, after: EventId | int = -1) -> Response:
        """The events of a background response after the number `after`, or after an event id."""
        field, number = (LAST_EVENT_ID, after.number) if isinstance(after, EventId) else ("starting_after", after)
        read = partial(self._background.events, current_caller().tenant, response_id, number, field)
        headers = {"x-request-id": response_id}
        return StreamedResponse(lambda _: read(), lambda: True, self._keep_alive_s, headers, _dialect(number))

    async def retrieve(self, request: Request) -> Response:
        """A stored or a background response; with `stream=true` the events of a background response after the number
        `starting_after`."""
        tenant, response_id = current_caller().tenant, request.path_params["response_id"]
        row = await self._background.get(tenant, response_id)
        if request.query_params.get("stream", "").lower() == "true":
            if row is None:
                await self._store.run(self._store.find, tenant, response_id)
                raise invalid_field("stream", "is true; only a response that was made with background has its events")
            return self._events_of(response_id, _starting_after(request, response_id))
        if row is not None:
            return _json(row.response)
        found = await self._store.run(self._store.find, current_caller().tenant, request.path_params["response_id"])
        return Response(found.body, media_type="application/json")

    async def delete(self, request: Request) -> DeletedResponse:
        """Deletes a stored response."""
        response_id = request.path_params["response_id"]
        tenant = current_caller().tenant
        was_in_background = await self._background.remove(tenant, response_id)
        if not was_in_background or await self._store.run(self._store.get, tenant, response_id) is not None:
            await self._store.run(self._store.remove, tenant, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, request: Request) -> Response:
        """Cancels a running response of any gateway. A finished response does not change."""
        response_id, tenant = request.path_params["response_id"], current_caller().tenant
        if (state := await self._background.cancel(tenant, response_id)) is not None:
            return _json(state)
        if (ended := await self._store.run(self._store.get, tenant, response_id)) is not None:
            return Response(ended.body, media_type="application/json")
        if not response_id.startswith(ID_PREFIX):
            await self._store.run(self._store.find, tenant, response_id)
        await self._models.cancel(response_id)
        # Its own call ends with an error, so its output is lost.
        head = ResponseHead(response_id, int(clock.unix_s()), self._models.default.model.name)
        return JSONResponse(response_head(head, CANCELLED))

    async def list_input_items(self, request: Request) -> InputItems:
        """The items that a response answers, including earlier turns, last item first."""
        response_id = request.path_params["response_id"]
        tenant = current_caller().tenant
        if (asked := await self._background.asked(tenant, response_id)) is None:
            asked = (await self._store.run(self._store.find, tenant, response_id)).asked
        return item_page(input_items(response_id, asked), request.query_params)

    async def compact(self, request: Request) -> Response:
        """A shorter conversation: the messages of the user, and the model's summary of the conversation."""
        body = await parse(CompactBody, await read_body(request, self._body_limits), self._body_limits)
        generator = self._models.of(body.model, ModelKind.TEXT)
        conversation = await self._conversation_with(body)
        return respond(
            generator,
            CompactCall(body, body.model or generator.model.name, self._store, conversation),
            self._keep_alive_s,
        )

    async def count_input_tokens(self, request: Request) -> InputTokens:
        """The number of tokens of the prompt that a response would have."""
        body = await parse(InputBody, await read_body(request, self._body_limits), self._body_limits)
        conversation = await self._conversation_with(body)
        prompt = prompt_of(body, conversation.prompt)
        with renaming(lambda: names_of(body, conversation)):
            tokenized = await self._texts.tokenize(body.model or None, prompt, add_special_tokens=False)
        return {"object": "response.input_tokens", "input_tokens": len(tokenized.token_ids)}


def _dialect(after: int) -> Dialect:
    """The dialect of the events after the number `after`."""
    return dataclasses.replace(OPENAI, names_events=True, error_event=partial(error_event, number=after + 1))


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _starting_after(request: Request, response_id: str) -> EventId | int:
    """The last event that the caller has, -1 if none. Raises InvalidArgument if it belongs to another response."""
    if (last := last_event_id(request)) is not None:
        if last.request_id != response_id:
            raise invalid_field(LAST_EVENT_ID, f'is "{last!s:.200}", not an event of response "{response_id:.80}"')
        return last
    text = request.query_params.get("starting_after")
    if text is None:
        return -1
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise invalid_field("starting_after", f'is "{text[:40]}"; it must be the sequence_number of an event')
    return int(text)
