"""The page /ui."""

from gateway.api.front import Front, FrontContext
from gateway.api.ui.access import OperatorAccess
from gateway.api.ui.history import LoadHistory
from gateway.api.ui.routes import ui_routes


def open_front(context: FrontContext) -> Front:
    """Opens the front. The page has a chat if OpenAI's front is open."""
    history = LoadHistory(context.generator.replicas.links, context.gateway_id)
    return Front(
        routes=ui_routes(context, history),
        tasks={"history of the load": history.run},
        access=OperatorAccess(),
    )
