"""/v1/chat/completions: answers and chunks."""

from collections.abc import Iterable, Sequence
from typing import Any

from gateway.openai.logprobs import chat_logprobs, prompt_logprobs
from gateway.openai.schemas import ChatBody
from gateway.openai.shapes import NOT_FINISHED, ChunkUsage, Head, finish_fields, usage_fields
from gateway.openai.token_text import TokenTexts
from gateway.replicas.events import Chunk, Finished, PositionLogprobs, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.running import Result

_ROLE = {"role": "assistant"}


class ChatShaper:
    """Shapes the answer to a chat request; each sequence is the content of one assistant message."""

    def __init__(self, head: Head, body: ChatBody, live: LiveRequest, texts: TokenTexts | None) -> None:
        """`texts` are those of the tokens, where log probabilities are asked for."""
        self._head = head
        self._body = body
        self._live = live
        self._texts = texts
        self._started: set[int] = set()
        self._usage_so_far = ChunkUsage(body, [live])

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        ((sequences, usage),) = results
        choices = [
            {
                "index": sequence.finished.sequence_index,
                "message": _ROLE | {"content": sequence.text, "refusal": None},
                "logprobs": self._logprobs(sequence.logprobs),
            }
            | finish_fields(sequence.finished, self._live.request.stopping)
            for sequence in sequences
        ]
        answer = self._head.fields("chat.completion") | {"choices": choices, "usage": usage_fields([usage])}
        if self._body.prompt_logprobs is not None and self._texts is not None:
            answer["prompt_logprobs"] = prompt_logprobs(
                self._texts, self._live.prompt_logprobs, self._body.prompt_logprobs
            )
        return answer

    def chunk(self, position: int, event: Chunk | Finished) -> dict[str, Any]:
        match event:
            case Chunk(sequence_index=index):
                delta = self._role(index) | {"content": event.text}
                choice = {"index": index, "delta": delta, "logprobs": self._logprobs(event.logprobs)} | NOT_FINISHED
            case Finished(sequence_index=index):
                finish = finish_fields(event, self._live.request.stopping)
                choice = {"index": index, "delta": self._role(index), "logprobs": None} | finish
        return self._chunk([choice]) | self._usage_so_far.after(event)

    def usage_chunk(self, usages: Sequence[Usage]) -> dict[str, Any]:
        return self._chunk([]) | {"usage": usage_fields(usages)}

    def _role(self, index: int) -> dict[str, Any]:
        """The role, in the first chunk of each choice."""
        if index in self._started:
            return {}
        self._started.add(index)
        return _ROLE

    def _logprobs(self, logprobs: Iterable[PositionLogprobs]) -> dict[str, Any] | None:
        return chat_logprobs(self._texts, logprobs) if self._body.logprobs and self._texts is not None else None

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head.fields("chat.completion.chunk") | {"choices": choices}
