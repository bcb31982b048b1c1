"""The routes below /ui: the page and its files, the feed, blocks, and OpenAI's paths that its chat uses.

All files come from this gateway, and the page loads no scripts or other files from elsewhere (see `access.HEADERS`).
OpenAI's paths are also served here because browsers send the operator's cookie only to paths below /ui.
"""

import contextlib
import hashlib
import json
import mimetypes
import socket
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.api.front import Front, FrontContext
from gateway.api.openapi import ApiRoute
from gateway.api.ui import access, feed
from gateway.api.ui.watch_messages import block_object, block_request
from gateway.auth.caller import current_caller
from gateway.auth.keys import NoAuthenticator
from gateway.request.models import Models
from gateway.settings import KILLABLE
from quire.rpc.errors import NotFound, Unavailable, invalid_field

_CHAT_PATH, _MODELS_PATH = "/v1/chat/completions", "/v1/models"
_BLOCK_TIMEOUT_S = 5.0
_MAX_KILL_BYTES = 256
_MEDIA_TYPES = {".js": "text/javascript", ".svg": "image/svg+xml"}


def open_front(context: FrontContext) -> Front:
    """Opens the front, with the routes of the open fronts that a chat needs. The page has a chat if OpenAI's front is
    open."""
    models, authenticator, demo_socket = context.models, context.authenticator, context.settings.demo_socket
    history = feed.LoadHistory(models, context.gateway_id)
    files = _Files()
    has_keys = not isinstance(authenticator, NoAuthenticator)
    routes = [each for front in context.opened for each in front.routes if each.path in (_CHAT_PATH, _MODELS_PATH)]
    chat_body = next((each.body for each in routes if isinstance(each, ApiRoute) and each.path == _CHAT_PATH), None)

    async def root(request: Request) -> Response:
        return RedirectResponse(f"{access.ROOT}/", 307, headers=dict(access.HEADERS))

    async def page(request: Request) -> Response:
        return files.answer("index.html", request)

    async def file(request: Request) -> Response:
        return files.answer(request.path_params["name"], request)

    async def events(request: Request) -> Response:
        wants_memory = request.query_params.get("memory", "1") != "0"
        stream = feed.feed(models, current_caller(), history, wants_memory=wants_memory)
        headers = {**access.HEADERS, "x-accel-buffering": "no"}
        return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

    async def block(request: Request) -> Response:
        return JSONResponse(await _read_block(models, request), headers=dict(access.HEADERS))

    async def about(request: Request) -> Response:
        known = {
            # None if the gateway serves no chats.
            "parameters": chat_body and chat_body.model_json_schema(),
            "has_keys": has_keys,
            "can_kill": demo_socket is not None,
            **feed.gateway_state(models),
        }
        return JSONResponse(known, headers=dict(access.HEADERS))

    async def kill(request: Request) -> Response:
        if demo_socket is None:
            raise NotFound("services are killed from the page only with --demo")
        _kill(demo_socket, await _service_to_kill(request))
        return Response(status_code=204, headers=dict(access.HEADERS))

    async def key(request: Request) -> Response:
        return await access.take_key(request, authenticator, context.metrics.count_refused_caller)

    own = [
        Route("/", root),
        Route(access.ROOT, root),
        Route(f"{access.ROOT}/", page),
        Route(f"{access.ROOT}/feed", events),
        Route(f"{access.ROOT}/block", block),
        Route(f"{access.ROOT}/about", about),
        Route(f"{access.ROOT}/kill", kill, methods=["POST"]),
        Route(access.KEY_PATH, key, methods=["POST"]),
        *(Route(access.ROOT + each.path, each.endpoint, methods=sorted(each.methods or ())) for each in routes),
        Route(f"{access.ROOT}/{{name}}", file),
    ]
    return Front(routes=own, tasks={"history of the load": history.run}, access=access.OperatorAccess())


class _Files:
    """The page's own files, read once."""

    def __init__(self) -> None:
        folder = resources.files("gateway.api.ui") / "static"
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
        self._tags = {name: f'"{hashlib.sha256(data).hexdigest()[:16]}"' for name, data in self._files.items()}

    def answer(self, name: str, request: Request) -> Response:
        """The answer with a file, or 304 if the browser already has it. Raises NotFound for unknown files."""
        if name not in self._files:
            raise NotFound(f"{access.ROOT}/{name[:80]} is not known here", reason="PATH_NOT_FOUND")
        headers = {**access.HEADERS, "etag": self._tags[name]}
        if request.headers.get("if-none-match") == self._tags[name]:
            return Response(status_code=304, headers=headers)
        suffix = name[name.rfind(".") :]
        media_type = _MEDIA_TYPES.get(suffix) or mimetypes.types_map.get(suffix, "application/octet-stream")
        return Response(self._files[name], media_type=media_type, headers=headers)


async def _service_to_kill(request: Request) -> str:
    """The service that the body names. A page of another site cannot send JSON without a preflight request, which is
    rejected. Raises QuireError."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise invalid_field("content-type", "must be application/json")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_KILL_BYTES:
            break
    with contextlib.suppress(ValueError, TypeError, KeyError):
        service = json.loads(body)["service"]
        if service in KILLABLE:
            return service
    raise invalid_field("service", f"must be one of {', '.join(KILLABLE)}")


def _kill(demo_socket: Path, service: str) -> None:
    """Makes the supervisor kill a service, which it then restarts. Raises Unavailable."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
        sending.setblocking(False)
        try:
            sending.sendto(service.encode(), str(demo_socket))
        except OSError as error:
            raise Unavailable(f"the supervisor does not listen at {demo_socket}: {error.strerror}") from error


async def _read_block(models: Models, request: Request) -> dict[str, Any]:
    """A block with its hash and its owners. Texts are shown only of the caller's own tenant. Raises QuireError."""
    query = request.query_params
    generator = models.owner_of(query.get("replica", ""))
    if generator is None:
        raise NotFound(f'replica "{query.get("replica", "")[:128]}" is not known here', reason="REPLICA_NOT_FOUND")
    text = query.get("block", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) < 1 << 31):
        raise invalid_field("block", f'is "{text[:40]}"; it must be the number of a block')
    asked = block_request(int(text), is_host=query.get("host") == "1")
    link = generator.replicas.links[query["replica"]]
    answer = await link.ask("ReadBlock", asked, _BLOCK_TIMEOUT_S)
    return block_object(answer, current_caller().tenant, generator.model.tokenizer.token_texts.text_of)
