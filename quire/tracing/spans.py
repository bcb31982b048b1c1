"""What a service sees of tracing."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from quire.tracing.context import TraceContext

AttributeValue = str | bool | int | float | Sequence[str]


class Span(Protocol):
    """One piece of work in a trace. Nothing here waits, and nothing raises."""

    @property
    def context(self) -> TraceContext:
        """To be handed to who works on for this span."""
        ...

    @property
    def is_recording(self) -> bool:
        """Whether somebody will see it; what is said of a span that is not sampled goes nowhere."""
        ...

    def set(self, attributes: Mapping[str, AttributeValue]) -> None: ...

    def event(self, name: str, at_ns: int, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """Something that happened at a time, in nanoseconds since 1970."""
        ...

    def link(self, context: TraceContext) -> None:
        """Names a span of another trace that belongs to this one; a malformed context names none."""
        ...

    def fail(self, description: str) -> None:
        """Marks it as failed by our own fault."""
        ...

    def end(self) -> None:
        """It is over, and will be sent soon. Idempotent."""
        ...


class Tracer(Protocol):
    """Starts the spans of one service."""

    def start(self, name: str, parent: TraceContext | None, attributes: Mapping[str, AttributeValue]) -> Span:
        """A span of what another process asked for. Without a parent, or with a malformed one, it begins a trace."""
        ...

    def close(self) -> None:
        """Sends what has ended, for two seconds at most, and drops the rest. Blocks."""
        ...
