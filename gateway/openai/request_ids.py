"""X-Request-Id: what a client sends comes back with the answer, whatever the answer is."""

from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
_sent: ContextVar[str | None] = ContextVar("request id of the client", default=None)


def sent_request_id() -> str | None:
    """The id that the client of the request that runs has sent."""
    return _sent.get()


class RequestIdMiddleware:
    """Gives the client's own id precedence over one that the answer has already."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = next((value for name, value in scope.get("headers", ()) if name == _HEADER), None)
        if sent is None:
            return await self._app(scope, receive, send)
        # A request has a task of its own.
        _sent.set(sent.decode("latin-1"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                others = [header for header in message.get("headers", ()) if header[0] != _HEADER]
                message = {**message, "headers": [*others, (_HEADER, sent)]}
            await send(message)

        return await self._app(scope, receive, send_with_id)
