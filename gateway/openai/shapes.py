"""What completions and chat completions have in common in the shape of their answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.requests.events import Chunk, Finished, FinishReason, GeneratedSequence, Usage
from gateway.requests.request import Stopping
from gateway.requests.running import Result
from quire.version import VERSION

SYSTEM_FINGERPRINT = f"quire-{VERSION}"


class Shaper(Protocol):
    """Turns what the requests of one call give into its answer.

    Requests are known by their position among those of the call, sequences by their index in their request.
    """

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The answer of a call that does not stream."""
        ...

    def chunk(self, position: int, event: Chunk | Finished) -> dict[str, Any]:
        """One chunk of a stream."""
        ...

    def usage_chunk(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The last chunk of a stream that was asked for the usage."""
        ...


@dataclass(frozen=True, slots=True)
class Head:
    """What every answer and every chunk of a call begins with. `created` is in seconds since the Unix epoch."""

    id: str
    created: int
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }


def as_chunk(sequence: GeneratedSequence) -> Chunk:
    """A whole sequence as if it had come at once."""
    index = sequence.finished.sequence_index
    return Chunk(index, 0, sequence.token_ids, sequence.text, sequence.logprobs)


def finish_fields(finished: Finished, stopping: Stopping) -> dict[str, Any]:
    """Why a sequence ended. `stop_reason` is the stop string or stop token that was asked for; none for an eos."""
    stop_reason: str | int | None = finished.stop_string
    if finished.stop_token_id in stopping.stop_token_ids:
        stop_reason = finished.stop_token_id
    return {"finish_reason": finished.reason.value, "stop_reason": stop_reason}


NOT_FINISHED = {"finish_reason": None, "stop_reason": None}
CUT = {"finish_reason": FinishReason.LENGTH.value, "stop_reason": None}


def usage_fields(usages: Sequence[Usage]) -> dict[str, Any]:
    """The usage of all requests of a call together."""
    prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    completion_tokens = sum(usage.generated_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
    }
