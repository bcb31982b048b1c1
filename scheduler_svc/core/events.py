"""What a step means for clients: tokens, ends and failures, in one batch for each client."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.logprob_columns import LogprobColumns, LogprobLog
from scheduler_svc.core.beam_search import BeamGroup
from scheduler_svc.core.request import ClientId, Handle, RequestKey
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup
from scheduler_svc.core.step import Array, SampleLogprobs


class SequenceEnd(NamedTuple):
    """A sequence ended; its tokens came before. A tuple, like all that each end makes: many may come at once."""

    handle: Handle
    sequence_index: int
    num_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    cumulative_logprob: float | None = None


class Usage(NamedTuple):
    """What a request cost. Times are seconds."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    queue_s: float
    prefill_s: float
    decode_s: float


class RequestEnd(NamedTuple):
    """All sequences of a request ended."""

    handle: Handle
    usage: Usage


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One request failed; others continue."""

    key: RequestKey
    reason: str
    message: str


@dataclass(slots=True)
class ClientEvents:
    """All that happened in one step to the requests of one client. The first four lists describe tokens, one entry
    each."""

    handles: list[Handle] = field(default_factory=list[Handle])
    sequence_indices: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    with_logprobs: list[int] = field(default_factory=list[int])
    """Which of the tokens have log probabilities, as rising indices into the lists above."""
    logprobs: LogprobLog = field(default_factory=LogprobLog)
    """One position for each of `with_logprobs`."""
    finished: list[SequenceEnd] = field(default_factory=list[SequenceEnd])
    completed: list[RequestEnd] = field(default_factory=list[RequestEnd])
    failed: list[RequestFailure] = field(default_factory=list[RequestFailure])

    @property
    def is_empty(self) -> bool:
        return not (self.handles or self.finished or self.completed or self.failed)


class EventLog:
    """The events of one step, by client."""

    def __init__(self) -> None:
        self.by_client: dict[ClientId, ClientEvents] = {}

    def tokens(
        self,
        clients: Array,
        handles: Array,
        indices: Array,
        offsets: Array,
        token_ids: Array,
        samples: Array,
        logprobs: SampleLogprobs | None,
    ) -> None:
        """Tokens of requests that get each at once. int64[n] each; `samples` are their indices among the step's."""
        for client in np.unique(clients).tolist():
            own = clients == client
            events = self._of(ClientId(client))
            if logprobs is not None:
                places, columns = logprobs.of(samples[own])
                events.with_logprobs += (places + len(events.token_ids)).tolist()
                events.logprobs.append(columns)
            events.handles += handles[own].tolist()
            events.sequence_indices += indices[own].tolist()
            events.offsets += offsets[own].tolist()
            events.token_ids += token_ids[own].tolist()

    def sequence_end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Where sequences are selected at the end, `request_end` says which ones end."""
        if not sequence.request.selects:
            self._of(sequence.request.key.client).finished.append(_sequence_end(sequence, sequence.index, reason))

    def request_end(self, group: SequenceGroup) -> None:
        """All sequences of the group ended. Delivers what was held back."""
        if group.beams is not None:
            self._deliver_hypotheses(group, group.beams)
        elif group.request.selects:
            self._deliver_best(group)
        key = group.request.key
        self._of(key.client).completed.append(RequestEnd(key.handle, usage_of(group)))

    def request_failure(self, failure: RequestFailure) -> None:
        self._of(failure.key.client).failed.append(failure)

    def _deliver_best(self, group: SequenceGroup) -> None:
        """The sequences with the highest mean log probability, best first."""
        best_first = sorted(group.sequences, key=lambda each: -each.cumulative_logprob / each.num_output_tokens)
        for index, sequence in enumerate(best_first[: group.request.num_returned]):
            self._deliver(group, index, sequence.output, sequence.held_back)
            assert sequence.finish_reason is not None
            end = _sequence_end(sequence, index, sequence.finish_reason)
            self._of(group.request.key.client).finished.append(end)

    def _deliver_hypotheses(self, group: SequenceGroup, beams: BeamGroup) -> None:
        """What the search found, best first."""
        key = group.request.key
        for index, hypothesis in enumerate(beams.search.best()[: group.request.num_returned]):
            self._deliver(group, index, hypothesis.token_ids, beams.logprobs.get(hypothesis, LogprobLog()))
            self._of(key.client).finished.append(
                SequenceEnd(
                    handle=key.handle,
                    sequence_index=index,
                    num_tokens=len(hypothesis.token_ids),
                    reason=FinishReason.STOP if hypothesis.ended_by_token else FinishReason.LENGTH,
                    stop_token_id=hypothesis.token_ids[-1] if hypothesis.ended_by_token else None,
                    cumulative_logprob=hypothesis.cumulative_logprob,
                )
            )

    def _deliver(self, group: SequenceGroup, index: int, output: SequenceOf[int], logprobs: LogprobLog) -> None:
        """All tokens of a sequence; `logprobs` has one position for each, or none."""
        key = group.request.key
        events = self._of(key.client)
        first = len(events.token_ids)
        events.with_logprobs += range(first, first + len(logprobs))
        events.logprobs.extend(logprobs)
        events.handles += [key.handle] * len(output)
        events.sequence_indices += [index] * len(output)
        events.offsets += range(len(output))
        events.token_ids += output

    def _of(self, client: ClientId) -> ClientEvents:
        events = self.by_client.get(client)
        if events is None:
            events = self.by_client[client] = ClientEvents()
        return events


def hold_back(sequence: Sequence, logprobs: LogprobColumns) -> None:
    """Keeps the log probabilities of the newest token of a sequence that may or may not be selected at the end."""
    sequence.cumulative_logprob += float(logprobs.chosen_logprobs[0])
    if sequence.request.sampling.logprobs is not None:
        sequence.held_back.append(logprobs)


def _sequence_end(sequence: Sequence, index: int, reason: FinishReason) -> SequenceEnd:
    request, token_ids = sequence.request, sequence.token_ids
    stop_token_id = token_ids[-1] if reason is FinishReason.STOP else None
    cumulative_logprob = sequence.cumulative_logprob if request.selects else None
    num_tokens = len(token_ids) - len(request.prompt)
    return SequenceEnd(request.key.handle, index, num_tokens, reason, stop_token_id, cumulative_logprob)


def usage_of(group: SequenceGroup) -> Usage:
    """What a finished group cost."""
    line = group.timeline
    started = line.arrived if line.started is None else line.started
    first = started if line.first_token is None else line.first_token
    last = first if line.last_token is None else line.last_token
    num_prompt = len(group.request.prompt)
    if group.beams is not None:
        num_generated = group.beams.num_generated
    else:
        num_generated = sum([len(each.token_ids) for each in group.sequences]) - num_prompt * len(group.sequences)
    times = (started - line.arrived, first - started, last - first)
    return Usage(num_prompt, group.cached_tokens or 0, num_generated, group.preemptions, *times)
