"""Routes with descriptions, and the documents /openapi.json and /docs, which are made from them."""

import asyncio
import functools
import html
import http.client
import inspect
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gateway.api.answers import HTTP_STATUSES, ErrorBody
from quire.version import VERSION

OPEN_PATHS = frozenset({"/health", "/live", "/ping", "/ready", "/version", "/v2/health/live", "/v2/health/ready"})
"""Paths without authentication: load balancers and supervisors request them, and have no keys."""
METRICS_PATH = "/metrics"
AnyObject = dict[str, Any]
_SCHEMAS = "#/components/schemas/"
_PAGE_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Quire</title>
<style>body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto } td { padding: 0 1em 0 0 }</style>
<h1>Quire: paths of the HTTP port</h1>
<p>For programs: <a href="openapi.json">openapi.json</a></p>"""
_EVENT_STREAM = "text/event-stream"
# Error statuses of every path that needs a key: no key, no permission, no such model, an internal error.
_STATUSES = frozenset({401, 403, 404, 500})


class ApiRoute(Route):
    """A route with its description for callers.

    If an endpoint does not return a Response, its value is sent as JSON; its annotation is then the answer's type.

    Attributes:
        body: The type of the request's body; None if it has none.
        answer: The type of a successful JSON answer; None if there is none.
        media_type: The media type of a successful answer that is not a stream.
        events: The type of the data of each event in a stream; None if the answer is not a stream.
        names_events: Whether the events of a stream have names. Otherwise [DONE] is the data of the last one.
        is_open: Whether it needs no API key.
        statuses: The statuses of its answers, including errors.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        method: Literal["GET", "POST", "DELETE"] = "GET",
        body: Any = None,
        answer: Any = None,
        events: Any = None,
        names_events: bool = False,
        refuses: bool = False,
        media_type: str = "application/json",
        statuses: Sequence[int] = (),
        error: Any = ErrorBody,
        errors: Collection[int] = (),
    ) -> None:
        """The first paragraph of the endpoint's docstring is the description.

        Args:
            refuses: Whether the path never succeeds.
            statuses: Further statuses that have the same answer as 200.
            error: The type of the body of errors.
            errors: Further error statuses, in addition to the statuses of all paths with, or without, a body.
        """
        # inspect.signature reads the parameters too, which took a sixth of the start of a gateway.
        returned = inspect.unwrap(endpoint).__annotations__["return"]
        if not (isinstance(returned, type) and issubclass(returned, Response)):
            answer, endpoint = returned, _as_json(endpoint)
        super().__init__(path, endpoint, methods=[method])
        self.method = method
        self.body = body
        self.answer = answer
        self.answer_statuses = frozenset({HTTPStatus.OK, *statuses})
        self.events = events
        self.names_events = names_events
        self.media_type = media_type
        self.is_open = path in OPEN_PATHS
        self.error = error
        own = {400} if refuses else {200, *statuses}
        self.statuses = sorted({*own, *errors, *(() if self.is_open else _STATUSES), *(HTTP_STATUSES if body else ())})


def _as_json(endpoint: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    @functools.wraps(endpoint)
    async def respond(request: Request) -> Response:
        found = await endpoint(request)
        return found if isinstance(found, Response) else JSONResponse(found)

    return respond


def description_routes(routes: Sequence[BaseRoute]) -> list[ApiRoute]:
    """The routes /openapi.json and /docs, which describe `routes` and themselves, for programs and for people."""

    @functools.cache
    def document() -> dict[str, Any]:
        return openapi_document([*(each for each in routes if isinstance(each, ApiRoute)), *own])

    # Made at the first request, since that takes longer than the whole start of a gateway; in a thread, so that streams
    # continue meanwhile.
    async def openapi(request: Request) -> AnyObject:
        """This document."""
        return await asyncio.to_thread(document)

    async def docs(request: Request) -> Response:
        """This document as a page."""
        return HTMLResponse(openapi_page(await asyncio.to_thread(document)))

    own = [ApiRoute("/openapi.json", openapi), ApiRoute("/docs", docs, media_type="text/html")]
    return own


def openapi_document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes, with the schemas of their bodies."""
    types = [
        each for route in routes for each in (route.body, route.answer, route.events, route.error) if each is not None
    ]
    references, definitions = TypeAdapter.json_schemas(
        [(repr(each), "validation", TypeAdapter(each)) for each in types], ref_template=_SCHEMAS + "{model}"
    )
    schemas = {repr(each): references[repr(each), "validation"] for each in types}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path_format, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": definitions.get("$defs", {}),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # A gateway without key files needs no key.
        "security": [{}, {"key": []}, {"x-api-key": []}],
    }


def _operation(route: ApiRoute, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": "_".join([route.method.lower(), *re.findall(r"\w+", route.path_format)]),
        "responses": {str(status): _response(route, status, schemas) for status in route.statuses},
    }
    if description := inspect.getdoc(route.endpoint):
        operation["summary"] = " ".join(description.partition("\n\n")[0].split())
    if route.param_convertors:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in route.param_convertors
        ]
    if route.body is not None:
        content = {"application/json": {"schema": schemas[repr(route.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.is_open:
        operation["security"] = []
    return operation


def _response(route: ApiRoute, status: int, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    description = http.client.responses.get(status, "Client Closed Request")
    if status in route.answer_statuses:
        content = {route.media_type: {} if route.answer is None else {"schema": schemas[repr(route.answer)]}}
        if route.events is not None:
            description += "; in a stream, each event has the schema"
            content[_EVENT_STREAM] = {"schema": _event(schemas[repr(route.events)], is_named=route.names_events)}
        return {"description": description, "content": content}
    # Errors before a route is found, or without a key, have the form of most paths.
    shapes = [schemas[repr(each)] for each in dict.fromkeys((route.error, ErrorBody))]
    schema = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _event(schema: Mapping[str, Any], *, is_named: bool) -> dict[str, Any]:
    """The schema of one server-sent event, which is the schema of a stream in OpenAPI 3.1."""
    data = {"contentMediaType": "application/json", "contentSchema": schema}
    if is_named:
        properties = {"event": {"type": "string"}, "data": {"type": "string", **data}}
    else:
        properties = {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, data]}}
    return {"type": "object", "properties": properties, "required": [*properties]}


def openapi_page(document: Mapping[str, Any]) -> str:
    """The document as one HTML page, which loads no other files."""
    parts = [_PAGE_HEAD]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('summary', ''))}</p>")
            if body := operation.get("requestBody"):
                parts.append(f"<p>Body: {_type_of(body['content']['application/json']['schema'])}</p>")
            parts.append(f"<p>Statuses: {', '.join(operation['responses'])}</p>")
    for name, schema in document["components"]["schemas"].items():
        parts.append(f'<h3 id="{name}">{name}</h3><p>{html.escape(schema.get("description", ""))}</p><table>')
        for field, each in schema.get("properties", {}).items():
            required = "required" if field in schema.get("required", ()) else ""
            parts.append(f"<tr><td><code>{field}</code></td><td>{_type_of(each)}</td><td>{required}</td></tr>")
        parts.append("</table>")
    return "\n".join(parts)


def _type_of(schema: Mapping[str, Any]) -> str:
    """A type in words, with a link to the fields of an object."""
    match schema:
        case {"$ref": str(reference)}:
            name = reference.removeprefix(_SCHEMAS)
            return f'<a href="#{name}">{name}</a>'
        case {"anyOf": list(alternatives)}:
            return " or ".join(_type_of(each) for each in alternatives)
        case {"type": "array", "items": dict(items)}:
            return f"list of {_type_of(items)}"
        case {"const": value} | {"type": "string", "contentSchema": value}:
            return "text of JSON" if isinstance(value, dict) else html.escape(str(value))
    return html.escape(str(schema.get("type", "anything")))
