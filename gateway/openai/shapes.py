"""What completions and chat completions have in common in the shape of their answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.openai.schemas import GenerationBody
from gateway.replicas.events import Chunk, Finished, FinishReason, GeneratedSequence, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.running import Result
from quire.common.v1.common_pb2 import StoppingParameters
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


def finish_fields(finished: Finished, stopping: StoppingParameters) -> dict[str, Any]:
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
    details = {"cached_tokens": sum(usage.cached_tokens for usage in usages)}
    return _token_counts(prompt_tokens, completion_tokens) | {"prompt_tokens_details": details}


class ChunkUsage:
    """The `usage` of each chunk of a stream: absent, null until the last chunk, or the usage so far."""

    def __init__(self, body: GenerationBody, live: Sequence[LiveRequest]) -> None:
        options = body.stream_options
        self._is_included = options is not None and bool(options.include_usage)
        self._is_continuous = options is not None and bool(options.continuous_usage_stats)
        self._prompt_tokens = sum(len(each.request.prompt_token_ids) for each in live)
        self._completion_tokens = 0

    def after(self, event: Chunk | Finished) -> dict[str, Any]:
        """The field of the chunk that carries `event`, to be called once for each in their order."""
        if not self._is_included:
            return {}
        if not self._is_continuous:
            return {"usage": None}
        if isinstance(event, Chunk):
            self._completion_tokens += len(event.token_ids)
        # How many prompt tokens were cached is known at the end.
        return {"usage": _token_counts(self._prompt_tokens, self._completion_tokens)}


def _token_counts(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
