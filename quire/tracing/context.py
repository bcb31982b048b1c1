"""Which span comes before, as it travels between processes."""

from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The two headers of W3C Trace Context, as they came: nobody has checked them. Whoever starts a span by a
    malformed one starts a trace of its own."""

    traceparent: str
    tracestate: str | None = None

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[str, str]]) -> "TraceContext | None":
        """What headers with lower-case names say; None without `traceparent`, or with several of them, which W3C has
        taken for none."""
        parents: list[str] = []
        states: list[str] = []
        for name, value in headers:
            if name == TRACEPARENT:
                parents.append(value)
            elif name == TRACESTATE:
                states.append(value)
        return cls(parents[0], ",".join(states) or None) if len(parents) == 1 else None
