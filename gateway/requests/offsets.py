"""What the client of a resumed stream has already."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.requests.request import GenerationRequest
from gateway.requests.violations import Violations


@dataclass(frozen=True, slots=True)
class ClientOffset:
    """Tokens of one sequence that the client has, and characters of its text where it counts these."""

    sequence_index: int
    num_tokens: int
    num_characters: int | None = None


def check_offsets(offsets: Sequence[ClientOffset], request: GenerationRequest) -> None:
    """Raises InvalidArgument where one names a sequence twice, or what the request cannot have."""
    violations = Violations()
    seen: set[int] = set()
    for position, offset in enumerate(offsets[: request.num_sequences + 1]):
        field, index = f"offsets[{position}]", offset.sequence_index
        if index >= request.num_sequences:
            violations.add(f"{field}.sequence_index", f"is {index}; the request has {request.num_sequences} sequences")
        elif index in seen:
            violations.add(f"{field}.sequence_index", f"is {index}, as of another entry; name each sequence once")
        elif offset.num_tokens > request.stopping.max_tokens:
            limit = request.stopping.max_tokens
            violations.add(f"{field}.offset", f"is {offset.num_tokens}; a sequence has at most {limit} tokens")
        seen.add(index)
    violations.raise_if_any()
