"""How the sequences of a beam search fork, grow and are dropped, step by step (the paper's section 4.4, figure 9)."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from quire.logprob_columns import LogprobColumns
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.beam import Candidates, Continuation, Hypothesis
from scheduler_svc.core.sequence import BeamGroup, Sequence


def advance(group: BeamGroup, batch: Batch) -> None:
    """Takes the search one step further, once every beam has its candidates. When it is over, `group.beams` is empty.

    A parent that goes on keeps its row and its blocks for its best continuation. Every other continuation of it goes
    to a sequence whose beam was dropped, which then shares all of the parent's blocks; only what they write afterwards
    is copied.
    """
    beams = group.beams
    candidates = [group.candidates[sequence.index] for sequence in beams]
    group.candidates.clear()
    step = group.search.advance(candidates, [sequence.output for sequence in beams])
    group.num_generated += len(beams)
    for hypothesis in step.finished:
        _keep_logprobs(group, hypothesis, candidates)
    chosen = [_position(beams[each.parent], candidates[each.parent], each.rank) for each in step.continuations]
    group.beams = _fork(beams, step.continuations, batch)
    for sequence, continuation, position in zip(group.beams, step.continuations, chosen, strict=True):
        _append(sequence, continuation, position, batch)


def _fork(beams: SequenceOf[Sequence], continuations: SequenceOf[Continuation], batch: Batch) -> list[Sequence]:
    """The sequence of each continuation, which has all that its parent has."""
    going_on = {each.parent for each in continuations}
    dropped = [sequence for index, sequence in enumerate(beams) if index not in going_on] if continuations else []
    for sequence in dropped:
        batch.blocks.free(sequence)
    taken: set[int] = set()
    chosen = []
    for each in continuations:
        sequence = parent = beams[each.parent]
        if each.parent in taken:
            sequence = dropped.pop()
            sequence.become_fork_of(parent)
            batch.fork(parent, sequence)
        taken.add(each.parent)
        chosen.append(sequence)
    return chosen


def _append(sequence: Sequence, each: Continuation, position: LogprobColumns | None, batch: Batch) -> None:
    assert sequence.row is not None
    batch.draft.append_token(sequence.row, sequence.num_tokens, each.token_id)
    batch.rows.chose(sequence.row)
    sequence.token_ids.append(each.token_id)
    if position is not None:
        sequence.held_back.append(position)


def _keep_logprobs(group: BeamGroup, hypothesis: Hypothesis, candidates: SequenceOf[Candidates]) -> None:
    sequence = group.beams[hypothesis.parent]
    last = _position(sequence, candidates[hypothesis.parent], hypothesis.rank)
    if last is not None:
        logprobs = group.logprobs[hypothesis] = sequence.held_back.copy()
        logprobs.append(last)


def _position(sequence: Sequence, candidates: Candidates, rank: int) -> LogprobColumns | None:
    """The log probabilities of a beam's candidate, where the request asks for them."""
    num_top = sequence.request.sampling.logprobs
    if num_top is None:
        return None
    token_ids, logprobs = candidates.token_ids[:num_top], candidates.logprobs[:num_top]
    return LogprobColumns(
        np.array([candidates.logprobs[rank]], np.float32),
        np.array([rank + 1], np.int32),
        np.array([len(token_ids)], np.int32),
        np.array(token_ids, np.int32),
        np.array(logprobs, np.float32),
    )
