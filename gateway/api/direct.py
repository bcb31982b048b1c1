"""Writes the events of a stream in the pass over the tokens of a step, without waking the task of each stream (ADR 95).

Most events of a stream differ from the one before only in their text. Such events are made from a template: the bytes
before and after the text. `python -m bench control --front http` measures the cost of an event.
"""

from collections.abc import Callable, Sequence

from gateway.api.answers import StreamedResponse, as_json
from gateway.replicas.events import Chunk
from gateway.replicas.live import LiveRequest

# The text of the event from which a template is made. No template is made if the event contains it elsewhere, too.
_PLACE = "\x1ftext\x1f"


class DirectEvents:
    """Writes the chunks of a call with one request as server-sent events without ids."""

    def __init__(
        self,
        response: StreamedResponse,
        written: Callable[[Chunk], bytes],
        repeats_form: Callable[[int], bool],
    ) -> None:
        """`written` returns the events of a chunk; `repeats_form` is `Shaper.repeats_form`."""
        self._response = response
        self._written = written
        self._repeats_form = repeats_form
        # The bytes before and after the text, by sequence; None if there is no template.
        self._templates: dict[int, tuple[bytes, bytes] | None] = {}

    @property
    def is_ready(self) -> bool:
        """Whether a chunk can be written without a wait."""
        return self._response.is_ready

    def write(self, chunk: Chunk) -> None:
        """Writes the events of a chunk."""
        if data := self._events(chunk):
            self._response.write_now(data)

    def _events(self, chunk: Chunk) -> bytes:
        if chunk.text and not (chunk.reasoning or chunk.tool_calls):
            index = chunk.sequence_index
            if index not in self._templates and self._repeats_form(index):
                self._templates[index] = self._template(index)
            if (template := self._templates.get(index)) is not None:
                return b"".join((template[0], as_json(chunk.text), template[1]))
        return self._written(chunk)

    def _template(self, index: int) -> tuple[bytes, bytes] | None:
        place = as_json(_PLACE)
        before, *after = self._written(Chunk(index, 0, [], _PLACE)).split(place)
        return (before, after[0]) if len(after) == 1 else None


def writes_directly(live: Sequence[LiveRequest]) -> bool:
    """Whether the chunks of a call's requests may be written in the pass over a step. A thread writes long log
    probabilities, and several requests of a call take turns."""
    (first, *others) = live
    request = first.request
    return not (others or request.is_steady or request.logprobs is not None or request.prompt_logprobs is not None)
