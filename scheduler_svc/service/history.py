"""Events of one request: its part of a step's events, and its kept output (`History`).

A reader that comes back says how much it has (`Held`) and gets the rest: at once, or in parts (`Replay`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.messages.logprob_columns import LogprobColumns, LogprobLog
from scheduler_svc.core.request import Handle, Request
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, RequestEnd, RequestFailure, SequenceEnd

_REPLAYED_AT_ONCE = 4096
"""Maximum size of one part of a replay, in the unit of `outbox.MAX_SIZE`. The scheduler makes a part in a millisecond.
A gateway needs some tens of milliseconds to detokenize it, and does nothing else meanwhile."""

End = SequenceEnd | RequestEnd | RequestFailure


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of consecutive prompt tokens of a request, the first one at `first_position`."""

    handle: Handle
    first_position: int
    token_ids: Sequence[int]
    columns: LogprobColumns

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.first_position + len(self.columns)

    def since(self, position: int) -> "PromptLogprobs | None":
        """The log probabilities from `position` on; None if there are none."""
        if position <= self.first_position:
            return self
        if position >= self.end:
            return None
        known = position - self.first_position
        columns = self.columns.part(known, len(self.columns))
        return PromptLogprobs(self.handle, position, self.token_ids[known:], columns)


# Events of a batch, request by request


def split_by_request(events: ClientEvents) -> dict[Handle, ClientEvents]:
    """The events of each request, in their order."""
    places: dict[Handle, list[int]] = {}
    for place, handle in enumerate(events.handles):
        places.setdefault(handle, []).append(place)
    parts = {handle: select(events, own, [handle] * len(own)) for handle, own in places.items()}
    for handle, end in ends_of(events):
        add_end(parts.setdefault(handle, ClientEvents()), end, handle)
    return parts


def select(events: ClientEvents, places: Sequence[int], handles: list[Handle]) -> ClientEvents:
    """The tokens at `places`, which rise, each under the handle at the same index of `handles`; no ends."""
    part = ClientEvents(
        handles,
        [events.sequence_indices[place] for place in places],
        [events.offsets[place] for place in places],
        [events.token_ids[place] for place in places],
    )
    if logged := events.with_logprobs:
        # Not a table of all positions, since one batch may be split into many parts.
        positions = [bisect_left(logged, place) for place in places]
        found = [new for new, position in enumerate(positions) if logged[position : position + 1] == [places[new]]]
        part.with_logprobs = found
        taken = np.array([positions[new] for new in found], np.int64)
        part.logprobs.append(events.logprobs.columns().take(taken))
    return part


def ends_of(events: ClientEvents) -> Iterator[tuple[Handle, End]]:
    """The ends of sequences, then of requests, then failures, each with the handle of its request."""
    for end in (*events.finished, *events.completed):
        yield end.handle, end
    for failure in events.failed:
        yield failure.key.handle, failure


def add_end(events: ClientEvents, end: End, handle: Handle) -> None:
    """Adds an end to the events, under this handle."""
    match end:
        case SequenceEnd():
            events.finished.append(end._replace(handle=handle))
        case RequestEnd():
            events.completed.append(end._replace(handle=handle))
        case RequestFailure():
            events.failed.append(replace(end, key=end.key._replace(handle=handle)))


# The kept output of one request


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a request's output that a reader has.

    Attributes:
        num_tokens: Number of tokens by sequence index.
        ended: Sequences whose end the reader has, or found itself by a stop string.
        end_of_prompt_logprobs: The first position of the prompt whose log probability the reader lacks.
    """

    num_tokens: Mapping[int, int] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    end_of_prompt_logprobs: int = 1

    @classmethod
    def of_resubmission(cls, request: Request, num_prompt_logprobs: int) -> "Held":
        """The output that a gateway has by the tokens and log probabilities that came with its resubmission."""
        return cls(
            {index: len(each.token_ids) for index, each in enumerate(request.emitted)},
            frozenset(index for index, each in enumerate(request.emitted) if each.has_ended),
            request.sampling.prompt_logprobs_start + num_prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """The number of tokens that readers were sent of a sequence, and whether it has ended."""

    index: int
    num_tokens: int
    has_ended: bool


@dataclass(slots=True)
class _Output:
    """Tokens of one sequence from offset `first` on. `logprobs` has an entry for each token, or is empty."""

    first: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobLog = field(default_factory=LogprobLog)


class History:
    """The kept output of one request: tokens, ends, and log probabilities of the prompt. The kept tokens of a sequence
    may begin at any offset, and have no gaps."""

    def __init__(self) -> None:
        self._outputs: dict[int, _Output] = {}
        self._ends: dict[int, SequenceEnd] = {}
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._completed: list[RequestEnd] = []
        self._failed: list[RequestFailure] = []

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in list(self._outputs.values()))

    @property
    def size(self) -> int:
        """Number of tokens and log probabilities."""
        logprobs = sum(output.logprobs.size for output in self._outputs.values())
        return self.num_tokens + logprobs + sum(entry.columns.size for entry in self._prompt_logprobs)

    def add_token(self, index: int, offset: int, token_id: int) -> None:
        """Adds the next token of a sequence, without log probabilities."""
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = _Output(offset)
        output.token_ids.append(token_id)

    def add(self, events: ClientEvents) -> None:
        """Adds the next events, all of this request."""
        for index, offset, token_id in zip(events.sequence_indices, events.offsets, events.token_ids, strict=True):
            self.add_token(index, offset, token_id)
        if events.with_logprobs:
            columns, positions = events.logprobs.columns(), np.arange(len(events.with_logprobs))
            indices = np.array(events.sequence_indices)[events.with_logprobs]
            for index in dict.fromkeys(indices.tolist()):
                self._outputs[index].logprobs.append(columns.take(positions[indices == index]))
        for _, end in ends_of(events):
            self.add_end(end)

    def add_end(self, end: End) -> None:
        """Adds the end of a sequence or of the request, after its tokens."""
        match end:
            case SequenceEnd():
                self._ends[end.sequence_index] = end
            case RequestEnd():
                self._completed.append(end)
            case RequestFailure():
                self._failed.append(end)

    def add_prompt_logprobs(self, entry: PromptLogprobs) -> None:
        self._prompt_logprobs.append(entry)

    def add_emitted(self, request: Request) -> None:
        """Adds the output that an earlier scheduler sent. The last token shows how a sequence ended: by a stop token,
        or else by length. Gateways find stop strings themselves."""
        for index, emitted in enumerate(request.emitted):
            self._outputs[index] = _Output(0, list(map(int, emitted.token_ids)))
            if emitted.has_ended:
                last = emitted.token_ids[-1] if emitted.token_ids else None
                stop_token_id = last if last in request.stop_token_ids else None
                reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
                num_tokens = len(emitted.token_ids)
                self._ends[index] = SequenceEnd(request.key.handle, index, num_tokens, reason, stop_token_id)

    def clear(self) -> None:
        for kept in (self._outputs, self._ends, self._prompt_logprobs, self._completed, self._failed):
            kept.clear()

    def can_resume(self, held: Held, progress: Sequence[SequenceProgress] | None, end_of_prompt_logprobs: int) -> bool:
        """Whether this history has all output that the reader lacks.

        Args:
            held: The output that the reader has.
            progress: The output that readers were sent so far, by sequence; None if the request is over.
            end_of_prompt_logprobs: The first position of the prompt whose log probability was not computed yet.
        """
        if self._failed:
            return True
        if progress is None and not self._completed:
            return False
        first_position = self._prompt_logprobs[0].first_position if self._prompt_logprobs else end_of_prompt_logprobs
        if first_position > held.end_of_prompt_logprobs:
            return False
        if progress is None:
            progress = [SequenceProgress(index, end.num_tokens, has_ended=True) for index, end in self._ends.items()]
        return not any(self._lacks(each, held) for each in progress if each.index not in held.ended)

    def _lacks(self, progress: SequenceProgress, held: Held) -> bool:
        """Whether an end or a token of a sequence is missing here that the reader needs."""
        if progress.has_ended and progress.index not in self._ends:
            return True
        output = self._outputs.get(progress.index)
        return held.num_tokens.get(progress.index, 0) < (progress.num_tokens if output is None else output.first)

    def rest_after(self, held: Held, handle: Handle) -> tuple[ClientEvents, list[PromptLogprobs]]:
        """The output that the reader lacks, under the reader's handle."""
        events = ClientEvents()
        for index in self.indices():
            if index not in held.ended:
                self.add_tokens(events, handle, index, held.num_tokens.get(index, 0))
        self.add_ends(events, handle, held.ended)
        entries = [entry.since(held.end_of_prompt_logprobs) for entry in self._prompt_logprobs]
        return events, [replace(entry, handle=handle) for entry in entries if entry is not None]

    def indices(self) -> list[int]:
        """The sequences that have tokens here."""
        return sorted(self._outputs)

    def add_tokens(
        self, events: ClientEvents, handle: Handle, index: int, begin: int, max_tokens: int | None = None
    ) -> int:
        """Adds at most `max_tokens` tokens of a sequence to the events: from offset `begin` on, or from the first kept
        one if that is later. Returns the number of added tokens."""
        output = self._outputs[index]
        skipped = max(begin - output.first, 0)
        end = len(output.token_ids) if max_tokens is None else min(skipped + max_tokens, len(output.token_ids))
        token_ids = output.token_ids[skipped:end]
        first_event = len(events.handles)
        if len(output.logprobs) and token_ids:
            events.with_logprobs += range(first_event, first_event + len(token_ids))
            events.logprobs.append(output.logprobs.part(skipped, end))
        events.handles += [handle] * len(token_ids)
        events.sequence_indices += [index] * len(token_ids)
        events.offsets += range(output.first + skipped, output.first + end)
        events.token_ids += token_ids
        return len(token_ids)

    def add_ends(self, events: ClientEvents, handle: Handle, ended: frozenset[int]) -> None:
        """Adds all ends to the events, except of the sequences in `ended`."""
        ends = [end for index, end in sorted(self._ends.items()) if index not in ended]
        for end in (*ends, *self._completed, *self._failed):
            add_end(events, end, handle)


class Replay:
    """Sends a reader the output that it lacks in parts, at the reader's pace. The history may grow meanwhile, and the
    replay sends the new tokens, too. `on_done` is called with the last part: later events go directly into the
    outbox."""

    def __init__(
        self, history: History, held: Held, handle: Handle, charge_per_token: int, on_done: Callable[[], object]
    ) -> None:
        """`charge_per_token` is the size of a token and its log probabilities, in the unit of `outbox.MAX_SIZE`."""
        self._history = history
        self._num_tokens = dict(held.num_tokens)
        self._ended = held.ended
        self._max_tokens = max(_REPLAYED_AT_ONCE // charge_per_token, 1)
        self._on_done = on_done
        self.handle = handle
        self.is_done = False

    def next_part(self) -> ClientEvents:
        """The next tokens; in the last part also the ends."""
        events, room = ClientEvents(), self._max_tokens
        for index in self._history.indices():
            if index not in self._ended:
                begin = self._num_tokens.get(index, 0)
                count = self._history.add_tokens(events, self.handle, index, begin, room)
                self._num_tokens[index], room = begin + count, room - count
        if room > 0:
            self.is_done = True
            self._history.add_ends(events, self.handle, self._ended)
            self._on_done()
        return events
