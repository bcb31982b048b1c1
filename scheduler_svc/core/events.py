"""Collects what a step's result meant for each client."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from quire.logprob_columns import LogprobColumns, LogprobLog
from scheduler_svc.core.logprobs import SampleLogprobs
from scheduler_svc.core.request import ClientId
from scheduler_svc.core.sequence import BeamGroup, FinishReason, Sequence, SequenceGroup
from scheduler_svc.core.step_plan import ClientEvents, RequestEnd, RequestFailure, SequenceEnd, Usage


class EventLog:
    """The events of one step, by client."""

    def __init__(self) -> None:
        self.by_client: dict[ClientId, ClientEvents] = {}

    def hold_back(self, sequence: Sequence, logprobs: LogprobColumns | None) -> None:
        """The log probabilities of the newest token of a sequence that may or may not be selected at the end."""
        if logprobs is None:
            return
        sequence.cumulative_logprob += float(logprobs.chosen_logprobs[0])
        if sequence.request.sampling.logprobs is not None:
            sequence.held_back.append(logprobs)

    def tokens(
        self,
        clients: np.ndarray,
        handles: np.ndarray,
        indices: np.ndarray,
        offsets: np.ndarray,
        token_ids: np.ndarray,
        samples: np.ndarray,
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
        """Where sequences are selected at the end, which ones end is said there."""
        if not sequence.request.selects:
            self._of(sequence.request.key.client).finished.append(_sequence_end(sequence, sequence.index, reason))

    def request_end(self, group: SequenceGroup) -> None:
        """All sequences of the group ended; what was held back is delivered."""
        if group.beams is not None:
            self._deliver_hypotheses(group, group.beams)
        elif group.request.selects:
            self._deliver_best(group)
        key = group.request.key
        self._of(key.client).completed.append(RequestEnd(key.handle, usage_of(group)))

    def _deliver_best(self, group: SequenceGroup) -> None:
        """The sequences with the highest mean log probability, best first."""
        ranked = sorted(group.sequences, key=lambda each: -each.cumulative_logprob / each.num_output_tokens)
        for index, sequence in enumerate(ranked[: group.request.num_returned]):
            self._emit_all(sequence, index, sequence.output, sequence.held_back)
            assert sequence.finish_reason is not None
            end = _sequence_end(sequence, index, sequence.finish_reason)
            self._of(group.request.key.client).finished.append(end)

    def _deliver_hypotheses(self, group: SequenceGroup, beams: BeamGroup) -> None:
        """What the search found, best first."""
        key = group.request.key
        for index, hypothesis in enumerate(beams.search.best()[: group.request.num_returned]):
            self._emit_all(
                group.sequences[0], index, hypothesis.token_ids, beams.logprobs.get(hypothesis, LogprobLog())
            )
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

    def _emit_all(self, sequence: Sequence, index: int, output: SequenceOf[int], logprobs: LogprobLog) -> None:
        """All tokens of a sequence; `logprobs` has one position for each, or none."""
        key = sequence.request.key
        events = self._of(key.client)
        first = len(events.token_ids)
        events.with_logprobs += range(first, first + len(logprobs))
        events.logprobs.extend(logprobs)
        events.handles += [key.handle] * len(output)
        events.sequence_indices += [index] * len(output)
        events.offsets += range(len(output))
        events.token_ids += output

    def request_failure(self, group: SequenceGroup, reason: str, message: str) -> None:
        key = group.request.key
        self._of(key.client).failed.append(RequestFailure(key, reason, message))

    def _of(self, client: ClientId) -> ClientEvents:
        events = self.by_client.get(client)
        if events is None:
            events = self.by_client[client] = ClientEvents()
        return events


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
