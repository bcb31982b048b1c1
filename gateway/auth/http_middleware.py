"""Authentication of HTTP requests: no path is reached without a key, but those that are named here."""

from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.auth.caller import Caller, set_caller
from gateway.auth.keys import Authenticator
from gateway.openai.errors import error_answer
from quire.rpc.errors import PermissionDenied, QuireError, Unauthenticated

# Load balancers and supervisors ask these, and they have no keys.
OPEN_PATHS = frozenset({"/health", "/ready", "/version"})
METRICS_PATH = "/metrics"


class AuthMiddleware:
    """Refuses requests without a valid key before their body is read, and says who the others come from.

    Metrics are of all tenants together: they are shown to operators, or to everyone where `open_metrics` is set.
    """

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, on_refusal: Callable[[str], None], *, open_metrics: bool
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._on_refusal = on_refusal
        self._open_paths = OPEN_PATHS | ({METRICS_PATH} if open_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan" and scope["path"] not in self._open_paths:
            try:
                set_caller(self._caller_of(scope))
            except QuireError as error:
                self._on_refusal(error.reason)
                return await _refuse(error, send)
        return await self._app(scope, receive, send)

    def _caller_of(self, scope: Scope) -> Caller:
        shown = [value for name, value in scope["headers"] if name == b"authorization"]
        caller = self._authenticator.authenticate(shown)
        if scope["path"] == METRICS_PATH and not caller.access.is_operator:
            raise PermissionDenied("metrics are for the API keys of operators", reason="OPERATORS_ONLY")
        return caller


async def _refuse(error: QuireError, send: Send) -> None:
    answer = error_answer(error, str)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer.body)).encode())]
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
