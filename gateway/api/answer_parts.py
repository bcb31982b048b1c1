"""Parts of answers that several APIs write: log probabilities of tokens, and counts of output tokens.

Log probabilities belong to single tokens. A token may be a part of a character, so its bytes are exact, but its text is
an approximation.
"""

from collections.abc import Iterable, Iterator, Sequence

from typing_extensions import TypedDict

from gateway.api.answers import LazyList
from gateway.replicas.events import Logprob, PositionLogprobs, Usage
from gateway.text.tokenizer import TokenTexts

LOWEST = -9999.0
"""Represents -infinity, the log probability of excluded tokens, which JSON lacks. Clients know this value."""


class OutputTokensDetails(TypedDict):
    """Counts of output tokens. `reasoning_tokens` includes the marks around the reasoning; the other counts concern the
    request's prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


LogprobsByTokenId = dict[str, TokenLogprob]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: Iterable[ChatTokenLogprob]
    refusal: None


def output_tokens_details(usages: Sequence[Usage]) -> OutputTokensDetails:
    return {
        "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
        "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for usage in usages),
        "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for usage in usages),
    }


class NamedByIds:
    """Token ids in place of token texts, for a call that requests them."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def text_of(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    key_of = text_of

    def bytes_of(self, token_id: int) -> bytes:
        return self._texts.bytes_of(token_id)


def chat_logprobs(
    texts: TokenTexts | NamedByIds, logprobs: Iterable[PositionLogprobs], *, shows_chosen: bool = False
) -> ChatLogprobs:
    """Log probabilities of a chat. With `shows_chosen`, `top_logprobs` includes the chosen token in any case."""

    def entries() -> Iterator[ChatTokenLogprob]:
        for entry in logprobs:
            chosen, top = entry.chosen, entry.top
            if shows_chosen and all(each.token_id != chosen.token_id for each in top):
                top = (chosen, *top)
            yield {**_chat_entry(texts, chosen), "top_logprobs": [_chat_entry(texts, each) for each in top]}

    return {"content": LazyList(entries), "refusal": None}


def logprobs_by_token_id(
    texts: TokenTexts, logprobs: Iterable[PositionLogprobs], num_top: int
) -> LazyList[LogprobsByTokenId]:
    """One entry per token: the chosen and the most likely tokens by their ids, as in vLLM."""
    return LazyList(lambda: (_entry_by_token_id(texts, entry, num_top) for entry in logprobs))


def _entry_by_token_id(texts: TokenTexts, entry: PositionLogprobs, num_top: int) -> LogprobsByTokenId:
    return {
        str(each.token_id): {
            "logprob": finite(each.logprob),
            "rank": each.rank,
            "decoded_token": texts.text_of(each.token_id),
        }
        for each in (entry.chosen, *entry.top[:num_top])
    }


def _chat_entry(texts: TokenTexts | NamedByIds, entry: Logprob) -> TopLogprob:
    data = texts.bytes_of(entry.token_id)
    token = texts.text_of(entry.token_id) if isinstance(texts, NamedByIds) else data.decode(errors="replace")
    return {"token": token, "logprob": finite(entry.logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """The log probability as a number of JSON."""
    return max(logprob, LOWEST)
