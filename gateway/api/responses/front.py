"""OpenAI's Responses API, with stored responses and responses that run in the background."""

from functools import partial

from gateway.api.front import Front, FrontContext
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.background_store import BackgroundStore
from gateway.api.responses.calls import ResponseCall, conversation_with
from gateway.api.responses.read_response import ResponseBody, parse_body
from gateway.api.responses.routes import response_routes
from gateway.api.responses.store import open_store, sqlite_path


def open_front(context: FrontContext) -> Front:
    """Opens the front with its stores. Raises ConfigurationError if a store cannot be used."""
    place, max_bytes = context.settings.response_store, context.settings.max_stored_response_bytes
    store = open_store(place, max_bytes)
    background = BackgroundResponses(
        context.generator,
        BackgroundStore(sqlite_path(place), context.gateway_id, max_bytes),
        context.authenticator,
        partial(ResponseCall.of_kept, store=store),
    )

    async def read_call(data: bytes) -> ResponseCall:
        body = await parse_body(ResponseBody, data, context.body_limits)
        conversation = await conversation_with(store, body)
        return ResponseCall(body, body.model or context.generator.model.name, store, conversation)

    def close() -> None:
        store.close()
        background.close()

    return Front(
        routes=response_routes(context, store, background),
        tasks={"background responses": background.run},
        stop_runs=background.stop_runs,
        close=close,
        call_readers={"/v1/responses": read_call},
    )
