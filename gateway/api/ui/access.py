"""Access to the page. If keys are required, only operators may open it, and other callers get an error page.

A browser sends no key by itself when it opens a page. So the error page has a form for the key, and the browser then
sends the key in a cookie. Only paths below /ui get the cookie, scripts cannot read it, and pages of other sites cannot
make a browser send it. The cookie contains the key itself, because all gateways that share the port must accept it.
Browsers store cookies by host and not by port, so the cookie's name contains the port. Otherwise gateways at several
ports of one host would sign each other's users out.
"""

import base64
import binascii
import html
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Scope

from gateway.auth.caller import OWN_SITES, Caller
from gateway.auth.keys import Authenticator
from quire.rpc.errors import PermissionDenied, QuireError, Unauthenticated

ROOT = "/ui"
KEY_PATH = f"{ROOT}/key"
HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_COOKIE = "quire-operator"
_PORT = re.compile(r":([0-9]{1,5})$")
_MAX_FORM_BYTES = 4096
_REFUSAL = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Quire: for operators</title>
<link rel="stylesheet" href="/ui/style.css">
<link rel="icon" href="/ui/icon.svg">
<body class="refusal">
<main>
<h1>This page is for operators</h1>
<p>It shows the memory, the queues and the requests of all tenants, so this gateway shows it only to the holder of an
operator's API key.</p>
<p class="problem" role="alert">{problem}</p>
<form method="post" action="/ui/key">
<label for="key">API key of an operator</label>
<input id="key" name="key" type="password" autocomplete="current-password" required autofocus>
<button>Show the page</button>
</form>
<p class="hint"><code>quire keys add --tenant NAME --operator</code> makes such a key. It is kept in a cookie for
paths below <code>/ui</code> until the browser closes.</p>
</main>
"""


def is_below(path: str) -> bool:
    """Whether a path belongs to the page."""
    return path == ROOT or path.startswith(f"{ROOT}/")


class OperatorAccess:
    """See gateway.api.front.PageAccess.

    Attributes:
        open_paths: The redirect to the page, and the parts of the error page.
    """

    open_paths = frozenset({"/", KEY_PATH, f"{ROOT}/style.css", f"{ROOT}/icon.svg"})

    def keys_shown(self, scope: Scope) -> list[bytes]:
        """The key in the cookie, as an authorization header. Empty without the cookie, or if a page of another site
        made the browser send it."""
        request = Request(scope)
        if not is_below(scope["path"]) or request.headers.get("sec-fetch-site", "none") not in OWN_SITES:
            return []
        try:
            return [b"Bearer " + base64.urlsafe_b64decode(_cookies(request)[_cookie_at(request)])]
        except (KeyError, binascii.Error, ValueError):
            return []

    def check(self, scope: Scope, caller: Caller) -> None:
        """Raises PermissionDenied if the path belongs to the page, and the key does not belong to an operator."""
        if is_below(scope["path"]) and not caller.access.is_operator:
            raise PermissionDenied("the page is for operators; this API key has no such right", reason="OPERATORS_ONLY")

    def refusal(self, scope: Scope, error: QuireError) -> Response | None:
        """The error page if the caller opens the page itself, and not a file of it."""
        is_page = scope["method"] == "GET" and scope["path"] in (ROOT, f"{ROOT}/")
        return _error_page(error) if is_page else None


def _cookies(request: Request) -> dict[str, str]:
    """The cookies by name. Quire's cookie is base64, in quotes if it is padded. Python's own parser takes quadratic
    time for backslashes up to 3.11.9 and 3.12.5 (CVE-2024-7592): seconds for one header of a caller without a key."""
    pairs = [each.partition("=") for each in "; ".join(request.headers.getlist("cookie")).split(";")]
    return {name.strip(): value.strip().strip('"') for name, _, value in pairs}


def _cookie_at(request: Request) -> str:
    """The cookie's name, with the port in the browser's Host header, which omits default ports."""
    port = _PORT.search(request.headers.get("host", ""))
    return _COOKIE if port is None else f"{_COOKIE}-{port[1]}"


def _error_page(error: QuireError) -> Response:
    """The error page for callers that may not open the page."""
    status = HTTPStatus.UNAUTHORIZED if isinstance(error, Unauthenticated) else HTTPStatus.FORBIDDEN
    is_new = error.reason == "MISSING_API_KEY"
    problem = "" if is_new else html.escape(f"{error.message[:1].upper()}{error.message[1:]}.")
    extra = {"www-authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else {}
    return HTMLResponse(_REFUSAL.format(problem=problem), status, headers={**HEADERS, **extra})


async def take_key(request: Request, authenticator: Authenticator, on_refusal: Callable[[str], object]) -> Response:
    """Stores the key of the form in the cookie, if it belongs to an operator; an empty key deletes the cookie.
    `on_refusal` is called with the reason if the key is rejected."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_FORM_BYTES:
            error = Unauthenticated("the API key is not valid", reason="INVALID_API_KEY")
            on_refusal(error.reason)
            return _error_page(error)
    key = parse_qs(body.decode("latin-1")).get("key", [""])[0].strip()
    answer = RedirectResponse(f"{ROOT}/", 303, headers=dict(HEADERS))
    cookie = _cookie_at(request)
    if not key:
        answer.delete_cookie(cookie, path=ROOT)
        return answer
    try:
        caller = authenticator.authenticate([b"Bearer " + key.encode()])
        OperatorAccess().check(request.scope, caller)
    except QuireError as error:
        on_refusal(error.reason)
        return _error_page(error)
    answer.set_cookie(
        cookie,
        base64.urlsafe_b64encode(key.encode()).decode(),
        path=ROOT,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer
