"""One sequence of a live request: turns the scheduler's tokens into text and log probabilities, once and in order."""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gateway.replicas.events import Chunk, Finished, FinishReason, TokenLogprobs, Usage
from gateway.replicas.generation_request import GenerationRequest
from gateway.text.detokenizer import TextPieces
from gateway.text.formats.parser import NOTHING, Output, OutputParser, joined
from gateway.text.stop import StopMatcher, StopStrings
from quire.messages.logprob_columns import LogprobColumns, LogprobLog

# The text of more tokens is made before they are taken, so that the end of a sequence has little left to make.
_MAX_UNREAD = 256


class TokenGapError(Exception):
    """Tokens are missing between the last known token and the new ones."""


class SequenceStream:
    """One sequence of a live request: accepts each token exactly once, in order, and returns text, coalesced while the
    client is busy.

    Invariants: `token_ids` are all tokens of the sequence, so their number is the offset of the next event; the pending
    columns belong to the tokens that were not taken yet; once `finished` is set, no token is accepted.
    `last_token_at` is the time of the last token from a scheduler, None before the first one; `logprobs` has all log
    probabilities that came, if they are kept.
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
        parser: OutputParser | None = None,
        keeps_logprobs: bool = False,
    ) -> None:
        """Neither a stop string nor a token ends the sequence before token `min_tokens` + 1.

        `parser` separates reasoning and tool calls from the content; None means that all text is content. Stop strings
        are matched only in the content. `keeps_logprobs` is for a durable request, whose client may return for them.
        """
        self.index = index
        self.token_ids: list[int] = []
        self.num_reasoning_tokens = 0
        self.finished: Finished | None = None
        self.last_token_at: float | None = None
        self.logprobs = LogprobLog()
        self._keeps_logprobs = keeps_logprobs
        self._detokenizer = detokenizer
        self._parser = parser
        self._calls_tools = False
        self._matcher = None if stop_strings is None else StopMatcher(stop_strings)
        self._ending_token_ids = ending_token_ids
        self._min_tokens = min_tokens
        self._includes_stop_string = include_stop_string
        # A token that ends the sequence has no text, but only the scheduler knows whether the sequence did end there.
        self._withheld_token: int | None = None
        self._taken = 0
        # The part that the client already has: tokens, and characters of their text if it counts them.
        self._known_tokens = 0
        self._known_characters: int | None = None
        # Output that the client lacks, of tokens that it has.
        self._left_over = NOTHING
        self._finish_taken = False
        # Output of the first tokens that were not taken, one entry per token. The text of the tokens after them is made
        # when they are taken: of all at once, while the client is slower than the scheduler.
        self._pending: list[Output] = []
        self._pending_logprobs = LogprobLog()
        # Output that became certain after the last token.
        self._last = NOTHING
        self._cumulative_logprob: float | None = None
        # Number of first tokens that are already in the sum when they arrive.
        self._num_summed = 0

    def accept(self, offset: int, token_ids: Sequence[int], logprobs: LogprobColumns | None = None) -> int:
        """Adds tokens that are new, and returns their number.

        Tokens that came before are dropped, and so are tokens after the end: the scheduler generates them until the
        gateway notifies it that a stop string ended the sequence.

        `offset` is the position of the first token in the output; `logprobs` has one position per token.

        Raises:
            TokenGapError: tokens before `offset` never came.
        """
        if self.finished is not None:
            return 0
        before = len(self.token_ids)
        seen = before - offset
        if seen < 0:
            raise TokenGapError(f"sequence {self.index} has {before} tokens, an event starts at {offset}")
        if logprobs is None and self._reads_later and self._ending_token_ids.isdisjoint(token_ids):
            self.token_ids += token_ids[seen:] if seen else token_ids
            if self.num_pending - len(self._pending) > _MAX_UNREAD:
                self._read_pending()
            return len(self.token_ids) - before
        self._read_pending()
        chosen = None if logprobs is None else logprobs.chosen_logprobs.tolist()
        for position in range(seen, len(token_ids)):
            if self.finished is not None:
                break
            if chosen is not None and offset + position >= self._num_summed:
                self._cumulative_logprob = (self._cumulative_logprob or 0.0) + chosen[position]
            self._accept_token(token_ids[position])
        count = len(self.token_ids) - before
        if logprobs is not None and count:
            new = logprobs.part(seen, seen + count)
            self._pending_logprobs.append(new)
            if self._keeps_logprobs:
                self.logprobs.append(new)
        return count

    def finish(
        self,
        num_tokens: int,
        reason: FinishReason,
        stop_token_id: int | None,
        cumulative_logprob: float | None,
        vector: bytes = b"",
    ) -> None:
        """Ends the sequence as the scheduler reports it. No effect if it is already finished.

        Raises:
            TokenGapError: the number of tokens that came differs.
        """
        if self.finished is not None:
            return
        if num_tokens != len(self.token_ids):
            raise TokenGapError(f"sequence {self.index} ended with {num_tokens} tokens, {len(self.token_ids)} came")
        self._read_pending()
        withheld = self._withheld_token
        text = "" if withheld is None or withheld == stop_token_id else self._detokenizer.push(withheld)
        stop_string = self._release_rest(text + self._detokenizer.flush())
        if stop_string is not None:
            reason, stop_token_id = FinishReason.STOP, None
        elif reason is FinishReason.STOP and self._calls_tools:
            reason = FinishReason.TOOL_CALLS
        # The sum of the log probabilities that came; without them, the sum of a scheduler that chose among sequences.
        if self._cumulative_logprob is not None:
            cumulative_logprob = self._cumulative_logprob
        self.finished = Finished(self.index, num_tokens, reason, stop_string, stop_token_id, cumulative_logprob, vector)

    def finish_if_complete(self, max_tokens: int) -> None:
        """Ends the sequence, as the scheduler would, if its last token or its length ends it."""
        if self._withheld_token is not None:
            self.finish(len(self.token_ids), FinishReason.STOP, self._withheld_token, self._cumulative_logprob)
        elif len(self.token_ids) >= max_tokens:
            self.finish(len(self.token_ids), FinishReason.LENGTH, None, self._cumulative_logprob)

    def skip(
        self, num_tokens: int, num_characters: int | None = None, *, cumulative_logprob: float | None = None
    ) -> None:
        """Skips `num_tokens` tokens that the client has, and `num_characters` characters or all output of these tokens.

        Must be called before any output is taken. If the client sent the tokens with the request, it may also send the
        sum of their log probabilities; call `drop_skipped` when the tokens are accepted.
        """
        self._known_tokens = num_tokens
        self._known_characters = num_characters
        if cumulative_logprob is not None:
            self._cumulative_logprob, self._num_summed = cumulative_logprob, num_tokens

    def drop_skipped(self) -> None:
        """Drops the output and the log probabilities of skipped tokens that have arrived."""
        count = min(self._known_tokens, len(self.token_ids)) - self._taken
        if count <= 0:
            return
        if self._known_characters is not None:
            self._left_over = joined([self._left_over, self._unknown(self._take_output(count))])
        else:
            self._take_output(count)
        self._take_logprobs(count)

    @property
    def is_behind_client(self) -> bool:
        """Whether the client has tokens that have not arrived here."""
        return self._known_tokens > len(self.token_ids)

    @property
    def num_pending(self) -> int:
        """The number of tokens that were not taken yet."""
        return len(self.token_ids) - self._taken

    @property
    def has_output(self) -> bool:
        """Whether there are tokens or output that were not taken."""
        return self.num_pending > 0 or self._last is not NOTHING or self._left_over is not NOTHING

    @property
    def has_end(self) -> bool:
        """Whether the sequence has ended, and its end was not taken."""
        return self.finished is not None and not self._finish_taken

    def take_chunk(self, max_tokens: int) -> Chunk | None:
        """The next tokens, at most `max_tokens`, or None if there is no output."""
        if self._known_tokens > self._taken:
            self.drop_skipped()
        offset, end = self._taken, min(self._taken + max_tokens, len(self.token_ids))
        count = end - offset
        output = self._unknown(self._take_output(count))
        if self._last is not NOTHING and end == len(self.token_ids):
            output, self._last = joined([output, self._unknown(self._last)]), NOTHING
        if self._left_over is not NOTHING:
            output, self._left_over = joined([self._left_over, output]), NOTHING
        if not count and not output:
            return None
        token_ids = self.token_ids[offset:end]
        logprobs = TokenLogprobs(token_ids, self._take_logprobs(count)) if self._pending_logprobs else ()
        return Chunk(self.index, offset, token_ids, output.text, logprobs, output.reasoning, output.tool_calls)

    def take_token(self) -> Chunk | None:
        """The next token, or None. Output that became certain after the last token is a separate chunk, so the chunks
        depend on the tokens and not on their arrival times."""
        if not self.num_pending:
            return self.take_chunk(0)
        last, self._last = self._last, NOTHING
        chunk = self.take_chunk(1)
        self._last = last
        return chunk

    def take_finished(self) -> Finished | None:
        """The end of the sequence, once, after all chunks."""
        if self._finish_taken or self.num_pending:
            return None
        self._finish_taken = self.finished is not None
        return self.finished

    def _unknown(self, output: Output) -> Output:
        """The next piece of output, without the characters that the client has."""
        known = self._known_characters
        if not known:
            return output
        self._known_characters = max(known - output.num_characters, 0)
        return output.without(known)

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
        was_reasoning = self._is_reasoning
        output, stop_string = self._read(text)
        # The tokens that open and close the reasoning belong to it.
        self.num_reasoning_tokens += was_reasoning or self._is_reasoning
        self._pending.append(output)
        if stop_string is not None:
            self.finished = Finished(
                self.index,
                len(self.token_ids),
                FinishReason.STOP,
                stop_string=stop_string,
                cumulative_logprob=self._cumulative_logprob,
            )

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.is_reasoning

    @property
    def _reads_later(self) -> bool:
        """Whether only the client needs the text of the next tokens."""
        return self._parser is None and self._matcher is None and self._withheld_token is None

    def _read_pending(self) -> None:
        """Makes the output of each token that was not taken, as tokens that follow need it."""
        begin = self._taken + len(self._pending)
        self._pending += [Output(self._detokenizer.push(token_id)) for token_id in self.token_ids[begin:]]

    def _take_output(self, count: int) -> Output:
        """The output of the next `count` tokens, which are taken."""
        begin, self._taken = self._taken, self._taken + count
        pieces = list[Output]()
        if self._pending:
            pieces = self._pending[:count]
            del self._pending[:count]
            begin += len(pieces)
        if begin == self._taken:
            return joined(pieces)
        new = Output(self._detokenizer.push_all(self.token_ids[begin : self._taken]))
        return joined([*pieces, new]) if pieces else new

    def _take_logprobs(self, count: int) -> LogprobColumns | None:
        return self._pending_logprobs.take(count) if self._pending_logprobs else None

    def _read(self, text: str) -> tuple[Output, str | None]:
        """The output that is certain with the newest token, and the stop string that ends the sequence, if any."""
        output = Output(text) if self._parser is None else self._parser.push(text)
        self._calls_tools = self._calls_tools or bool(output.tool_calls)
        if self._matcher is None:
            return output, None
        certain, stop_string = self._match(self._matcher, output.text)
        return output._replace(text=certain), stop_string

    def _release_rest(self, text: str) -> str | None:
        """Adds the output after the last token; returns the stop string that it completed, if any."""
        output = Output(text) if self._parser is None else joined([self._parser.push(text), self._parser.finish()])
        self._calls_tools = self._calls_tools or bool(output.tool_calls)
        stop_string = None
        if self._matcher is not None:
            text, stop_string = self._match(self._matcher, output.text)
            if stop_string is None:
                text += self._matcher.flush()
            output = output._replace(text=text)
        self._last = joined([self._last, output])
        return stop_string

    def _match(self, matcher: StopMatcher, text: str) -> tuple[str, str | None]:
        """The text that is certain with the newest token, and the stop string that ends the sequence, if any."""
        if len(self.token_ids) <= self._min_tokens:
            return matcher.pass_over(text), None
        certain, stop_string = matcher.push(text)
        return (certain + stop_string if stop_string and self._includes_stop_string else certain), stop_string


def with_gateway_counts(usage: Usage, request: GenerationRequest, sequences: Sequence[SequenceStream]) -> Usage:
    """The usage that a scheduler reports of a request, with the counts that only the gateway knows."""
    counts = {"reasoning_tokens": sum(stream.num_reasoning_tokens for stream in sequences)}
    if predicted := request.predicted:
        accepted = num_predicted(predicted, [stream.token_ids for stream in sequences])
        counts["accepted_prediction_tokens"] = sum(accepted)
        counts["rejected_prediction_tokens"] = sum(max(len(predicted) - each, 0) for each in accepted)
    if request.stopping.stop:
        # The scheduler generates tokens until the gateway notifies it that a stop string ended a sequence.
        counts["generated_tokens"] = sum(len(stream.token_ids) for stream in sequences)
    return dataclasses.replace(usage, **counts)


def num_predicted(predicted: Sequence[int], sequences: Sequence[Sequence[int]]) -> list[int]:
    """The number of correctly predicted tokens in each sequence. A token is compared with the next token of the
    prediction; after a difference, matching continues at the next place that has the sequence's last two tokens."""
    if not predicted:
        return [0] * len(sequences)
    # A prediction may be as long as a context: places are sorted once, and only of pairs that occur in a sequence.
    wanted = np.unique(np.concatenate([_pairs(each) for each in sequences]))
    pairs = _pairs(predicted)
    numbers = np.searchsorted(wanted, pairs, side="right") - 1
    hits = np.flatnonzero(wanted[numbers] == pairs) if wanted.size else numbers[:0]
    of_pair = np.argsort(numbers[hits], kind="stable")
    places: list[int] = (hits[of_pair] + 1).tolist()
    ends: list[int] = np.cumsum(np.bincount(numbers[hits], minlength=len(wanted))).tolist()
    ranges = dict(zip(wanted.tolist(), pairwise([0, *ends]), strict=True))
    return [_num_followed(predicted, places, ranges, token_ids) for token_ids in sequences]


def _num_followed(
    predicted: Sequence[int], places: list[int], ranges: dict[int, tuple[int, int]], token_ids: Sequence[int]
) -> int:
    num_right = following = 0
    for pair, token_id in zip([None, *_pairs(token_ids).tolist()], token_ids, strict=False):
        if following < len(predicted) and predicted[following] == token_id:
            num_right, following = num_right + 1, following + 1
        elif pair is not None:
            start, end = ranges[pair]
            if (index := bisect_left(places, following, start, end)) < end:
                num_right, following = num_right + 1, places[index] + 1
    return num_right


def _pairs(token_ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """A number for each pair of consecutive tokens."""
    ids = np.asarray(token_ids, np.int64)
    return ids[:-1] << 32 | ids[1:]
