"""What stands before all paths of the HTTP port: hosts' names, unexpected errors, and a port that drains."""

import ipaddress
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.auth.http_middleware import OPEN_PATHS
from gateway.openai.errors import ErrorAnswer, error_answer
from gateway.requests.violations import shortened

ANY_HOST = "*"
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


class UnexpectedErrorMiddleware:
    """Answers 500 where the application fails. Unlike Starlette's own handler of such errors it runs behind the other
    middleware, so the answer has their headers, and the error is logged once, with the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            answer = error_answer(error, str)
            if not has_started:
                await _send(send, answer)


class HostMiddleware:
    """Refuses requests that name another host than this server's.

    A page of any site can point its own name at 127.0.0.1 when it has been loaded (DNS rebinding), and the browser then
    takes this server for a part of that site: it may call it, and read the answers. Only the `Host` header shows that.
    What load balancers and supervisors ask is always answered.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Sequence[str]) -> None:
        """Names of loopback are allowed besides `allowed_hosts`."""
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        # Without one it is no browser.
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        name = _name_of(host)
        if not name or name in self._allowed or _is_loopback(name):
            return await self._app(scope, receive, send)
        shown = shortened(name)
        message = (
            f'host is "{shown}"; this gateway answers to names of loopback, and to those that --allowed-hosts names, '
            f"so that pages of other sites cannot call it; --allowed-hosts {shown} allows it"
        )
        return await _send(send, ErrorAnswer(403, message, "host_not_allowed"))


def _name_of(host: str) -> str:
    """The host of a `Host` header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].strip().rstrip(".").lower()


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def _send(send: Send, answer: ErrorAnswer) -> None:
    headers = {"content-type": "application/json", "content-length": str(len(answer.body))} | dict(answer.headers)
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": answer.body})
