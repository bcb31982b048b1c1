"""OpenAI's files and batches."""

from gateway.api.batches.lines import BatchLimits
from gateway.api.batches.routes import batch_routes
from gateway.api.batches.runner import Batches
from gateway.api.batches.store import BatchStore
from gateway.api.front import Front, FrontContext
from gateway.request.body_memory import BodyMemory
from gateway.request.counting import EntryLimits


def open_front(context: FrontContext) -> Front:
    """Opens the front, whose batches have requests of the fronts that are open already. Without --batch-dir all calls
    are rejected. Raises ConfigurationError if the directory cannot be used."""
    settings = context.settings
    call_readers = {path: read for front in context.opened for path, read in front.call_readers.items()}
    if settings.batch_dir is None:
        return Front(routes=batch_routes(None, context.body_limits, list(call_readers)))
    # A separate memory limit, so that batches take no memory from callers that wait for an answer.
    max_bytes = settings.max_total_body_bytes // 4
    batches = Batches(
        context.generator,
        BatchStore(settings.batch_dir, context.gateway_id, settings.max_batch_dir_bytes),
        context.authenticator,
        call_readers,
        BatchLimits(
            settings.max_batch_requests,
            settings.max_batch_file_bytes,
            settings.max_message_bytes,
            EntryLimits(settings.max_chat_messages),
        ),
        BodyMemory(max_bytes, max_bytes // 2 if settings.keys_files else None),
        gateway_id=context.gateway_id,
        concurrency=settings.batch_concurrency,
    )
    return Front(
        routes=batch_routes(batches, context.body_limits, list(call_readers)),
        tasks={"batches": batches.run},
        stop_runs=batches.stop_runs,
        close=batches.store.close,
    )
