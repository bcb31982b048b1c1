"""One sequence of a live request: from token events to what its client has not seen yet."""

from collections.abc import Sequence

from gateway.requests.events import Chunk, Finished, FinishReason
from gateway.requests.logprobs import TokenLogprobs
from gateway.text.clean_up import TextPieces
from gateway.text.stop_strings import StopMatcher, StopStrings
from quire.logprob_columns import LogprobColumns, LogprobLog


class TokenGapError(Exception):
    """Tokens of a sequence are missing between what came and what comes now."""


class SequenceStream:
    """Takes each token exactly once, in order; gives text, coalesced for as long as the client is busy.

    Invariants: `token_ids` are all tokens that count, the next event's offset is their number; the pending columns hold
    the tokens that were not taken yet; after `finished` is set nothing is accepted any more.
    """

    def __init__(
        self,
        index: int,
        detokenizer: TextPieces,
        stop_strings: StopStrings | None,
        ending_token_ids: frozenset[int],
        *,
        min_tokens: int = 0,
        include_stop_string: bool = False,
    ) -> None:
        """No stop string ends the sequence before token `min_tokens` + 1, as no token does."""
        self.index = index
        self.token_ids: list[int] = []
        self.finished: Finished | None = None
        self._detokenizer = detokenizer
        self._matcher = None if stop_strings is None else StopMatcher(stop_strings)
        self._ending_token_ids = ending_token_ids
        self._min_tokens = min_tokens
        self._includes_stop_string = include_stop_string
        # A token that ends the sequence has no text, but only the scheduler knows whether it did end it.
        self._withheld_token: int | None = None
        self._taken = 0
        # What the client has already: tokens, and characters of their text where it counts these.
        self._known_tokens = 0
        self._known_characters: int | None = None
        # Of tokens that the client has, text that it has not.
        self._left_over_text = ""
        self._finish_taken = False
        self._pending_texts: list[str] = []
        self._pending_logprobs = LogprobLog()
        # Text that became certain after the last token.
        self._last_text = ""
        self._cumulative_logprob: float | None = None

    def accept(self, offset: int, token_ids: Sequence[int], logprobs: LogprobColumns | None = None) -> int:
        """Takes the tokens that are new; returns their number. Tokens that were seen before are dropped, and so are
        those after the end: until the scheduler hears that a stop string ended the sequence, it goes on with it.

        `offset` is the position of the first one in the output; `logprobs` has one position a token.

        Raises:
            TokenGapError: tokens before `offset` never came.
        """
        if self.finished is not None:
            return 0
        seen = len(self.token_ids) - offset
        if seen < 0:
            raise TokenGapError(f"sequence {self.index} has {len(self.token_ids)} tokens, an event starts at {offset}")
        before = len(self.token_ids)
        chosen = None if logprobs is None else logprobs.chosen_logprobs.tolist()
        for position in range(seen, len(token_ids)):
            if self.finished is not None:
                break
            if chosen is not None:
                self._cumulative_logprob = (self._cumulative_logprob or 0.0) + chosen[position]
            self._accept_token(token_ids[position])
        count = len(self.token_ids) - before
        if logprobs is not None and count:
            self._pending_logprobs.append(logprobs.part(seen, seen + count))
        return count

    def end(
        self, num_tokens: int, reason: FinishReason, stop_token_id: int | None, cumulative_logprob: float | None
    ) -> None:
        """The scheduler ended the sequence. No effect when it is finished already.

        Raises:
            TokenGapError: it had another number of tokens than came.
        """
        if self.finished is not None:
            return
        if num_tokens != len(self.token_ids):
            raise TokenGapError(f"sequence {self.index} ended with {num_tokens} tokens, {len(self.token_ids)} came")
        text = self._detokenizer.push(self._withheld_token) if self._withheld_token not in (None, stop_token_id) else ""
        stop_string = self._release_rest(text + self._detokenizer.flush())
        if stop_string is not None:
            reason, stop_token_id = FinishReason.STOP, None
        # Its own sum, where logprobs came; else the scheduler's, which has one when it chose among several sequences.
        if self._cumulative_logprob is not None:
            cumulative_logprob = self._cumulative_logprob
        self.finished = Finished(self.index, num_tokens, reason, stop_string, stop_token_id, cumulative_logprob)

    def end_if_complete(self, max_tokens: int) -> None:
        """Ends the sequence, as the scheduler would, when its last token or its length say that it is over."""
        if self._withheld_token is not None:
            self.end(len(self.token_ids), FinishReason.STOP, self._withheld_token, self._cumulative_logprob)
        elif len(self.token_ids) >= max_tokens:
            self.end(len(self.token_ids), FinishReason.LENGTH, None, self._cumulative_logprob)

    def skip(self, num_tokens: int, num_characters: int | None = None) -> None:
        """The client has so many tokens, and characters of text, or the text of those tokens. To be called first."""
        self._known_tokens = num_tokens
        self._known_characters = num_characters

    def hold(self, num_tokens: int, num_characters: int | None, cumulative_logprob: float | None) -> None:
        """As `skip`, for tokens that come from the client itself, with the sum of their log probabilities. To be called
        before they are accepted, and `drop_held` afterwards, before any others are."""
        self.skip(num_tokens, num_characters)
        self._cumulative_logprob = cumulative_logprob

    def drop_held(self) -> None:
        """Forgets what the client has of the tokens so far."""
        self._drop_known()

    def take_chunk(self, max_tokens: int) -> Chunk | None:
        """The next undelivered tokens, `max_tokens` at most, or None."""
        self._drop_known()
        offset, end = self._taken, min(self._taken + max_tokens, len(self.token_ids))
        count = end - offset
        text = self._unknown_text("".join(self._pending_texts[:count]))
        if end == len(self.token_ids):
            text, self._last_text = text + self._unknown_text(self._last_text), ""
        text, self._left_over_text = self._left_over_text + text, ""
        if not count and not text:
            return None
        token_ids = self.token_ids[offset:end]
        chunk = Chunk(self.index, offset, token_ids, text, TokenLogprobs(token_ids, self._take_logprobs(count)))
        self._taken = end
        del self._pending_texts[:count]
        return chunk

    @property
    def num_pending(self) -> int:
        """Tokens that were not taken yet."""
        return len(self.token_ids) - self._taken

    def take_finished(self) -> Finished | None:
        """The end of the sequence, once, when all chunks were taken."""
        if self._finish_taken or self._taken < len(self.token_ids):
            return None
        self._finish_taken = self.finished is not None
        return self.finished

    def _drop_known(self) -> None:
        count = min(self._known_tokens, len(self.token_ids)) - self._taken
        if count <= 0:
            return
        text = "".join(self._pending_texts[:count])
        if self._known_characters is not None:
            self._left_over_text += self._unknown_text(text)
        self._taken += count
        del self._pending_texts[:count]
        self._take_logprobs(count)

    def _unknown_text(self, text: str) -> str:
        known = self._known_characters or 0
        if self._known_characters is not None:
            self._known_characters = max(known - len(text), 0)
        return text[known:]

    def _accept_token(self, token_id: int) -> None:
        text = ""
        if self._withheld_token is not None:
            text = self._detokenizer.push(self._withheld_token)
            self._withheld_token = None
        if token_id in self._ending_token_ids:
            self._withheld_token = token_id
        else:
            text += self._detokenizer.push(token_id)
        self.token_ids.append(token_id)
        if self._matcher is None:
            self._pending_texts.append(text)
            return
        certain, stop_string = self._match(self._matcher, text)
        self._pending_texts.append(certain)
        if stop_string is not None:
            self.finished = Finished(
                self.index,
                len(self.token_ids),
                FinishReason.STOP,
                stop_string=stop_string,
                cumulative_logprob=self._cumulative_logprob,
            )

    def _take_logprobs(self, count: int) -> LogprobColumns | None:
        """Those of the first pending tokens, None where none came."""
        return self._pending_logprobs.take(count) if self._pending_logprobs else None

    def _release_rest(self, text: str) -> str | None:
        """Adds the text after the last token; returns the stop string that it completed, if any."""
        stop_string = None
        if self._matcher is not None:
            text, stop_string = self._match(self._matcher, text)
            if stop_string is None:
                text += self._matcher.flush()
        self._last_text += text
        return stop_string

    def _match(self, matcher: StopMatcher, text: str) -> tuple[str, str | None]:
        """The text that is certain with the newest token, and the stop string that ends the sequence, if any."""
        if len(self.token_ids) <= self._min_tokens:
            return matcher.pass_over(text), None
        certain, stop_string = matcher.push(text)
        return (certain + stop_string if stop_string and self._includes_stop_string else certain), stop_string
