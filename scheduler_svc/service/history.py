"""What is kept of one request's events, so that a reader that has some of them gets the rest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from quire.logprob_columns import LogprobLog
from scheduler_svc.core.events import ClientEvents, RequestEnd, RequestFailure, SequenceEnd
from scheduler_svc.core.request import Request, RequestKey
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.service.client_events import under
from scheduler_svc.service.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Held:
    """What a reader has of a request already: tokens of each sequence, the sequences that have ended for it, and
    positions of the prompt with log probabilities."""

    num_tokens: Mapping[int, int] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    num_prompt_logprobs: int = 0

    @classmethod
    def of(cls, request: Request, num_prompt_logprobs: int) -> "Held":
        """What a gateway says when it submits a request again."""
        return cls(
            {index: len(each.token_ids) for index, each in enumerate(request.emitted)},
            frozenset(index for index, each in enumerate(request.emitted) if each.has_ended),
            num_prompt_logprobs,
        )


@dataclass(frozen=True, slots=True)
class SequenceProgress:
    """How far a sequence is."""

    index: int
    num_tokens: int
    has_ended: bool


@dataclass(slots=True)
class _Output:
    """Consecutive tokens of one sequence, from offset `first` on; `logprobs` has one entry a token, or none."""

    first: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobLog = field(default_factory=LogprobLog)


class History:
    """Events of one request in order. It may begin anywhere in the output, but has no gap after that."""

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
        """Tokens and log probabilities."""
        logprobs = sum(output.logprobs.size for output in self._outputs.values())
        return self.num_tokens + logprobs + sum(entry.columns.size for entry in self._prompt_logprobs)

    def add_token(self, index: int, offset: int, token_id: int) -> None:
        """One more token, which has no log probabilities."""
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = _Output(offset)
        output.token_ids.append(token_id)

    def add(self, events: ClientEvents) -> None:
        """What happened next; all of it is of this request."""
        for index, offset, token_id in zip(events.sequence_indices, events.offsets, events.token_ids, strict=True):
            self.add_token(index, offset, token_id)
        if events.with_logprobs:
            columns, positions = events.logprobs.columns(), np.arange(len(events.with_logprobs))
            of = np.array(events.sequence_indices)[events.with_logprobs]
            for index in dict.fromkeys(of.tolist()):
                self._outputs[index].logprobs.append(columns.take(positions[of == index]))
        self.add_ends(events.finished, events.completed, events.failed)

    def add_ends(
        self, finished: Sequence[SequenceEnd], completed: Sequence[RequestEnd], failed: Sequence[RequestFailure]
    ) -> None:
        """Ends of sequences or of the request, after their tokens."""
        self._ends |= {end.sequence_index: end for end in finished}
        self._completed += completed
        self._failed += failed

    def add_prompt_logprobs(self, entry: PromptLogprobs) -> None:
        self._prompt_logprobs.append(entry)

    def add_emitted(self, request: Request) -> None:
        """What an earlier scheduler said of the request belongs to what is kept. Where it ended a sequence, its tokens
        say how; gateways find by themselves that a stop string did."""
        for index, emitted in enumerate(request.emitted):
            self._outputs[index] = _Output(0, list(map(int, emitted.token_ids)))
            if emitted.has_ended:
                last = emitted.token_ids[-1] if emitted.token_ids else None
                stop_token_id = last if last in request.stop_token_ids else None
                reason = FinishReason.LENGTH if stop_token_id is None else FinishReason.STOP
                num_tokens = len(emitted.token_ids)
                self._ends[index] = SequenceEnd(request.key.handle, index, num_tokens, reason, stop_token_id)

    def clear(self) -> None:
        """Somebody else has it now."""
        for kept in (self._outputs, self._ends, self._prompt_logprobs, self._completed, self._failed):
            kept.clear()

    def completes(self, held: Held, progress: Sequence[SequenceProgress] | None, num_prompt_logprobs: int) -> bool:
        """Whether a reader that has `held` misses nothing that is not kept here.

        Args:
            progress: How far each sequence is that is said to readers; None where the request is over.
            num_prompt_logprobs: At how many positions of the prompt log probabilities were reported so far.
        """
        if self._failed:
            return True
        if progress is None and not self._completed:
            return False
        first_position = self._prompt_logprobs[0].first_position if self._prompt_logprobs else num_prompt_logprobs + 1
        if first_position > held.num_prompt_logprobs + 1:
            return False
        if progress is None:
            ended = [end for index, end in self._ends.items() if index not in held.ended]
            progress = [SequenceProgress(end.sequence_index, end.num_tokens, has_ended=True) for end in ended]
        return not any(self._lacks(each, held) for each in progress if each.index not in held.ended)

    def _lacks(self, progress: SequenceProgress, held: Held) -> bool:
        if progress.has_ended and progress.index not in self._ends:
            return True
        output = self._outputs.get(progress.index)
        return held.num_tokens.get(progress.index, 0) < (progress.num_tokens if output is None else output.first)

    def since(self, held: Held, key: RequestKey) -> tuple[ClientEvents, list[PromptLogprobs]]:
        """What a reader does not have, under the key by which it knows the request."""
        events = ClientEvents()
        for index, output in sorted(self._outputs.items()):
            if index in held.ended:
                continue
            skipped = max(held.num_tokens.get(index, 0) - output.first, 0)
            token_ids = output.token_ids[skipped:]
            first_event = len(events.handles)
            if len(output.logprobs):
                events.with_logprobs += range(first_event, first_event + len(token_ids))
                events.logprobs.append(output.logprobs.columns().part(skipped, len(output.logprobs)))
            events.handles += [key.handle] * len(token_ids)
            events.sequence_indices += [index] * len(token_ids)
            events.offsets += range(output.first + skipped, output.first + len(output.token_ids))
            events.token_ids += token_ids
        events.finished += [end for index, end in sorted(self._ends.items()) if index not in held.ended]
        events.completed += self._completed
        events.failed += self._failed
        entries = [entry.since(held.num_prompt_logprobs + 1) for entry in self._prompt_logprobs]
        return under(events, key), [replace(entry, handle=key.handle) for entry in entries if entry is not None]
