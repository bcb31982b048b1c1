"""What both clients' streams have in common: which events the caller sees, and what follows an error."""

from typing import Any

import grpc

from quire.client import convert
from quire.client.resumption import Recovery, Resumption
from quire.client.types import RequestCompleted, StreamEvent, TokenChunk
from quire.rpc.errors import from_rpc_error


class EventStream:
    """The events of one streamed generation, without the reading.

    Attributes:
        request_id: Of a durable request, by which it can be cancelled.
        completed: The last event, once it has come.
    """

    def __init__(self, recovery: Recovery) -> None:
        """Makes the first call."""
        self.completed: RequestCompleted | None = None
        self.request_id = recovery.request_id if isinstance(recovery, Resumption) else None
        self._recovery = recovery
        self._closed = False
        self._call = recovery.call()

    def _accept(self, response: Any) -> StreamEvent | None:
        """The event that a message brings; None where the caller has it. Internal as `from_stream_response`."""
        event = convert.from_stream_response(response)
        if not self._recovery.accept(event):
            return None
        if isinstance(event, RequestCompleted):
            self.completed = event
        return event

    def _delay_after(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the recovery's next call; raises what the caller sees where there is none."""
        return self._recovery.delay_after(from_rpc_error(error))


def first_text(event: StreamEvent) -> str:
    """What an event adds to the text of the first sequence; often nothing."""
    return event.text if isinstance(event, TokenChunk) and event.sequence_index == 0 else ""
