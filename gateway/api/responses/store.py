"""Responses that this gateway keeps in memory for `previous_response_id`."""

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import cast

from google.protobuf.message import Message

from gateway.types import ChatMessage
from quire.rpc.errors import FieldViolation, InvalidArgument, NotFound

# The memory of the Python objects of a message without its values, of a tool call without its texts, and of a response
# without its messages.
_MESSAGE_BYTES = 400
_CALL_BYTES = 300
_RESPONSE_BYTES = 1000


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON, and the conversation up to its answer, without instructions."""

    body: bytes
    messages: Sequence[ChatMessage]

    @property
    def num_bytes(self) -> int:
        return _RESPONSE_BYTES + len(self.body) + sum(map(_memory_of, self.messages))


def _memory_of(message: ChatMessage) -> int:
    """The memory of a message with all its fields, whatever they are."""
    return _MESSAGE_BYTES + sum(_memory_of_value(getattr(message, each.name)) for each in fields(message))


def _memory_of_value(value: object) -> int:
    match value:
        case None:
            return 0
        case str():
            return sys.getsizeof(value)
        case Message():
            return _CALL_BYTES + value.ByteSize()
        case list() | tuple():
            return sum(map(_memory_of_value, cast(Sequence[object], value)))
        case _:
            raise TypeError(f"the memory of a {type(value).__name__} in a message is not known")


@dataclass(slots=True)
class _TenantResponses:
    """The responses of one tenant, least recently used first."""

    by_id: OrderedDict[str, tuple[StoredResponse, int]] = field(
        default_factory=OrderedDict[str, tuple[StoredResponse, int]]
    )
    num_bytes: int = 0


class ResponseStore:
    """The responses of all tenants, at most `max_bytes` together; 0 keeps none.

    If the sum exceeds `max_bytes`, the tenant that holds most loses its least recently used response. Each response
    counts with its whole conversation.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._tenants: dict[str, _TenantResponses] = {}

    @property
    def keeps_any(self) -> bool:
        return self._max_bytes > 0

    def add(self, tenant: str, response_id: str, response: StoredResponse) -> None:
        """Keeps a response, unless it alone is too large."""
        num_bytes = response.num_bytes
        if num_bytes > self._max_bytes:
            return
        responses = self._tenants.setdefault(tenant, _TenantResponses())
        responses.by_id[response_id] = response, num_bytes
        responses.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].num_bytes)
            self._drop(largest, next(iter(self._tenants[largest].by_id)))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of the tenant, which becomes the most recently used one."""
        responses = self._tenants.get(tenant)
        if responses is None or response_id not in responses.by_id:
            return None
        responses.by_id.move_to_end(response_id)
        return responses.by_id[response_id][0]

    def find(self, tenant: str, response_id: str) -> StoredResponse:
        """As `get`. Raises NotFound if there is none."""
        found = self.get(tenant, response_id)
        if found is None:
            raise NotFound(f'response "{response_id:.80}" {self._absence}', reason="RESPONSE_NOT_FOUND")
        return found

    def earlier_messages(self, tenant: str, response_id: str | None) -> Sequence[ChatMessage]:
        """The conversation up to the response of a `previous_response_id`; empty for None. Raises InvalidArgument if
        the response is not kept."""
        if response_id is None:
            return ()
        found = self.get(tenant, response_id)
        if found is None:
            description = f'is "{response_id:.80}", which {self._absence}; send the items of the earlier turns in input'
            violation = FieldViolation("previous_response_id", description)
            raise InvalidArgument(
                f"previous_response_id {description}", reason="RESPONSE_NOT_FOUND", violations=[violation]
            )
        return found.messages

    def remove(self, tenant: str, response_id: str) -> None:
        """Deletes a response. Raises NotFound if there is none."""
        self.find(tenant, response_id)
        self._drop(tenant, response_id)

    @property
    def _absence(self) -> str:
        if not self.keeps_any:
            return "is not known: this gateway keeps no responses (--max-stored-response-bytes is 0)"
        return (
            f"is not known to this gateway: it keeps its own responses alone, as long as all together take at most "
            f"{self._max_bytes:,} bytes (--max-stored-response-bytes)"
        )

    def _drop(self, tenant: str, response_id: str) -> None:
        responses = self._tenants[tenant]
        _, num_bytes = responses.by_id.pop(response_id)
        responses.num_bytes -= num_bytes
        self._num_bytes -= num_bytes
        if not responses.by_id:
            del self._tenants[tenant]
