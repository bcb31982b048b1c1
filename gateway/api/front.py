"""The interface of a front: one API of a gateway, in a package of its own.

The package is imported only if the flag --fronts names it; gRPC is always served. It has a module `front` with the
function `open_front`, which takes the `FrontContext` and returns the `Front`. Fronts never import each other. A front
that uses another one finds it in `FrontContext.opened`.
"""

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from gateway.api.answers import Dialect
from gateway.api.body import BodyLimits
from gateway.api.respond import Call
from gateway.auth.caller import Caller
from gateway.auth.keys import Authenticator
from gateway.metrics import GatewayMetrics
from gateway.request.generator import Generator
from gateway.request.models import Models
from gateway.settings import GatewaySettings
from quire.rpc.errors import QuireError
from quire.tracing import Tracer

CallReader = Callable[[bytes], Awaitable[tuple[Generator, Call]]]
"""Makes a call from the body of a request, and chooses the generator that runs it. Raises QuireError."""


class PageAccess(Protocol):
    """The authentication of browsers on the paths of a front, in addition to API keys in headers."""

    @property
    def open_paths(self) -> Collection[str]:
        """Paths without authentication."""
        ...

    def keys_shown(self, scope: Scope) -> list[bytes]:
        """The key that a browser shows, as an authorization header; empty if there is none."""
        ...

    def check(self, scope: Scope, caller: Caller) -> None:
        """Raises PermissionDenied if the caller may not use the path."""
        ...

    def refusal(self, scope: Scope, error: QuireError) -> Response | None:
        """The page that answers a caller without access; None if the answer is an ordinary error."""
        ...


@dataclass(frozen=True, slots=True)
class Front:
    """One API, open at a gateway.

    Attributes:
        routes: The routes of the HTTP port.
        servicers: The servicers of gRPC services.
        handlers: Further handlers of gRPC methods, which are tried after all servicers.
        tasks: Functions that run until they are cancelled, by the names of their tasks. If one ends, the gateway fails.
        stop_runs: Stops work that no caller waits for, such as batches, when the gateway begins to drain.
        close: Closes stores, after all calls and tasks have ended.
        call_readers: By the path of an endpoint, the reader of the calls that a batch may make to it.
        dialect_of: The form in which a call gets its errors; None if the call belongs to another front.
        access: The authentication of browsers; None if the front only takes API keys in headers.
    """

    routes: Sequence[Route] = ()
    servicers: Mapping[ServiceDescriptor, object] = field(default_factory=dict[ServiceDescriptor, object])
    handlers: Sequence[grpc.GenericRpcHandler] = ()
    tasks: Mapping[str, Callable[[], Coroutine[Any, Any, None]]] = field(
        default_factory=dict[str, Callable[[], Coroutine[Any, Any, None]]]
    )
    stop_runs: Callable[[], Awaitable[None]] | None = None
    close: Callable[[], None] | None = None
    call_readers: Mapping[str, CallReader] = field(default_factory=dict[str, CallReader])
    dialect_of: Callable[[Scope], Dialect | None] = lambda scope: None
    access: PageAccess | None = None


@dataclass(frozen=True, slots=True)
class FrontContext:
    """The parts of a gateway that fronts use.

    Attributes:
        body_limits: The limits of request bodies, with the rule for unknown fields.
        started_at_s: The start of the gateway, in seconds since the Unix epoch.
        opened: The fronts that are open already, in the order of `gateway.settings.FRONTS`.
    """

    settings: GatewaySettings
    gateway_id: str
    models: Models
    authenticator: Authenticator
    metrics: GatewayMetrics
    tracer: Tracer | None
    body_limits: BodyLimits
    started_at_s: int
    opened: list[Front] = field(default_factory=list[Front])

    @property
    def keep_alive_s(self) -> float:
        """The maximum silence of a stream of server-sent events, in seconds; 0 means no limit."""
        return self.settings.sse_keepalive
