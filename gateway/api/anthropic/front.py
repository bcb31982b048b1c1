"""Anthropic's Messages API."""

from gateway.api.anthropic.routes import dialect_of, message_routes
from gateway.api.front import Front, FrontContext


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    return Front(routes=message_routes(context), dialect_of=dialect_of)
