"""Parses bodies of the HTTP API as it does."""

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gateway.api import fields
from gateway.api.body import BodyLimits
from gateway.api.field_rule import FieldRule
from gateway.api.generation_fields import Body
from gateway.request.counting import EntryLimits

BodyType = TypeVar("BodyType", bound=Body)
BODY_LIMITS = BodyLimits(1 << 22, EntryLimits(max_messages=10_000))
STRICT_LIMITS = BodyLimits(1 << 22, EntryLimits(max_messages=10_000), rule=FieldRule(is_strict=True))


def parse(kind: type[BodyType], body: bytes | Mapping[str, Any], limits: BodyLimits = BODY_LIMITS) -> BodyType:
    """The body as `fields.parse` returns it; raises the same errors."""
    parsing = fields.parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), limits)
    # In a thread: the caller may have an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, parsing).result()
