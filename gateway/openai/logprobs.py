"""Log probabilities in the shapes of completions, of chat completions, and of vLLM's prompt_logprobs."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from gateway.api.answers import LazyList
from gateway.openai.token_text import TokenTexts
from gateway.replicas.events import Logprob, PositionLogprobs, TokenIds
from gateway.text.detokenizer import TextPieces

# JSON has no infinity, which is the log probability of what is excluded; this is what clients know for it.
_LOWEST = -9999.0


class CompletionLogprobs:
    """Log probabilities of one choice of a completion; it knows where in the choice's text each token begins."""

    def __init__(self, texts: TokenTexts, detokenizer: TextPieces, num_top: int, *, text_offset: int = 0) -> None:
        """`text_offset` is the number of characters of the choice's text before its first token."""
        self._texts = texts
        self._detokenizer = detokenizer
        self._num_top = num_top
        self._offset = text_offset

    def shape(self, token_ids: TokenIds, logprobs: Iterable[PositionLogprobs | None]) -> dict[str, LazyList | None]:
        """The next tokens of the choice. A token without an entry has no log probability; a prompt's first has none.

        To be written once, before those that follow: where a token begins is known by then.
        """
        return {
            "tokens": LazyList(lambda: (self._texts.key_of(int(token_id)) for token_id in token_ids)),
            "token_logprobs": LazyList(lambda: (entry and _finite(entry.chosen.logprob) for entry in logprobs)),
            "top_logprobs": LazyList(lambda: map(self._top, logprobs)) if self._num_top else None,
            "text_offset": LazyList(lambda: self._offsets(token_ids)),
        }

    def _offsets(self, token_ids: TokenIds) -> Iterator[int]:
        for token_id in token_ids:
            yield self._offset
            self._offset += len(self._detokenizer.push(int(token_id)))

    def _top(self, entry: PositionLogprobs | None) -> dict[str, float] | None:
        """The most likely tokens, and the chosen one where it is none of them."""
        if entry is None:
            return None
        top = {self._texts.key_of(each.token_id): _finite(each.logprob) for each in entry.top[: self._num_top]}
        return top | {self._texts.key_of(entry.chosen.token_id): _finite(entry.chosen.logprob)}


def chat_logprobs(texts: TokenTexts, logprobs: Iterable[PositionLogprobs]) -> dict[str, Any]:
    def entries() -> Iterator[dict[str, Any]]:
        for entry in logprobs:
            yield _chat_entry(texts, entry.chosen) | {"top_logprobs": [_chat_entry(texts, each) for each in entry.top]}

    return {"content": LazyList(entries), "refusal": None}


def prompt_logprobs(texts: TokenTexts, logprobs: Iterable[PositionLogprobs], num_top: int) -> LazyList:
    """One entry a prompt token, by token id; the first token has none."""
    return LazyList(lambda: chain([None], logprobs_by_token_id(texts, logprobs, num_top)))


def logprobs_by_token_id(texts: TokenTexts, logprobs: Iterable[PositionLogprobs], num_top: int) -> LazyList:
    """One entry a token: the chosen token and the most likely ones by their ids, as vLLM shows them."""
    return LazyList(lambda: (_entry_by_token_id(texts, entry, num_top) for entry in logprobs))


def _entry_by_token_id(texts: TokenTexts, entry: PositionLogprobs, num_top: int) -> dict[str, Any]:
    return {
        str(each.token_id): {
            "logprob": _finite(each.logprob),
            "rank": each.rank,
            "decoded_token": texts.text_of(each.token_id),
        }
        for each in (entry.chosen, *entry.top[:num_top])
    }


def _chat_entry(texts: TokenTexts, entry: Logprob) -> dict[str, Any]:
    data = texts.bytes_of(entry.token_id)
    return {"token": data.decode(errors="replace"), "logprob": _finite(entry.logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
