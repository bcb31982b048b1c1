"""Has HTTP clients leave a gateway that drains."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_CLOSE = (b"connection", b"close")


class DrainMiddleware:
    """While the gateway drains, each connection closes behind its next answer, whose headers say so. A client that kept
    one open then connects anew, before its connection closes under a request."""

    def __init__(self, app: ASGIApp, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._is_draining():
                message = {**message, "headers": [*message.get("headers", ()), _CLOSE]}
            await send(message)

        await self._app(scope, receive, send_and_close)
