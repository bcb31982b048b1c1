"""The undisturbed answer to each request, from a plain implementation that shares no code with the services."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import product

from quire.client import EarlyStopping, FinishReason, GenerationOptions
from tests.sim.world.gateways import character_of, digest_of
from tests.sim.world.model import Draw, candidates, line_of, mixed, mixed_prefixes, next_token
from tests.sim.world.traffic import EOS_TOKEN_ID, MAX_MODEL_LEN, NUM_SPECIAL_TOKENS, Generate
from tests.support.fake_pool import Prefixes
from tests.support.logprobs import Line


@dataclass(frozen=True, slots=True)
class ExpectedSequence:
    """One whole sequence. `lines` are the log probabilities of its tokens."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    lines: tuple[Line, ...]

    @property
    def cumulative_logprob(self) -> float:
        return sum(line.logprob for line in self.lines)


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer to a request. `prompt_lines` begin at the prompt's second token, or at the requested position.

    Attributes:
        num_generated: Numbers of generated tokens that its usage may have, from a scheduler or a gateway that lost it.
    """

    sequences: tuple[ExpectedSequence, ...]
    prompt_lines: tuple[Line, ...]
    num_generated: frozenset[int] | None


def answer_of(request: Generate, model: int) -> Answer:
    """The undisturbed answer of a model."""
    options = request.options
    if request.others:
        answers = [answer_of(part, model) for part in request.parts.values()]
        counts = product(*(each.num_generated or () for each in answers))
        sequences = tuple(sequence for each in answers for sequence in each.sequences)
        return Answer(sequences, (), frozenset(map(sum, counts)))
    if options.beam_search is not None:
        return Answer(_beams(request, model), _prompt_lines(request, model), None)
    sampled = [_sequence(request, model, index) for index in range(max(options.best_of or 1, request.num_returned))]
    returned = sampled
    if request.chooses:
        means = [each.cumulative_logprob / len(each.token_ids) for each in sampled]
        best = sorted(range(len(sampled)), key=lambda index: -means[index])[: request.num_returned]
        returned = [sampled[index] for index in best]
    counts = {sum(len(each.token_ids) for each in some) for some in (sampled, returned)}
    return Answer(tuple(returned), _prompt_lines(request, model), frozenset(counts))


def _max_tokens(request: Generate) -> int:
    room = MAX_MODEL_LEN - len(request.prompt)
    return room if request.options.max_tokens is None else min(request.options.max_tokens, room)


def _ending(options: GenerationOptions) -> frozenset[int]:
    return frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else {EOS_TOKEN_ID})


def _text(token_ids: Sequence[int]) -> str:
    return "".join(character_of(token_id) for token_id in token_ids if token_id >= NUM_SPECIAL_TOKENS)


def _seed(request: Generate, index: int) -> int:
    seed = request.options.seed or 0
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, person=b"quire/seed/1").digest(), "little")


def _sequence(request: Generate, model: int, index: int) -> ExpectedSequence:
    options = request.options
    pattern = "" if options.constraint is None else options.constraint.regex or ""
    draw = Draw(options.temperature or 0.0, options.top_k or 0, _seed(request, index), pattern)
    prefixes, ending, start = (
        Prefixes(request.prompt, digest_of(request.adapter)),
        _ending(options),
        len(request.prompt),
    )
    lines: list[Line] = []
    text, reason = "", FinishReason.LENGTH
    stop_string: str | None = None
    stop_token_id: int | None = None
    while len(lines) < _max_tokens(request):
        position = len(prefixes.token_ids)
        mix = mixed(prefixes.hashes(0, position), model)
        may_end = len(lines) >= (options.min_tokens or 0)
        token_id = next_token(mix, draw if may_end else draw._replace(banned=ending), position)
        prefixes.append(token_id)
        lines.append(line_of(mix, token_id, options.logprobs or 0))
        if token_id in ending:
            reason, stop_token_id = FinishReason.STOP, token_id
            break
        text += (said := _text([token_id]))
        found = [stop for stop in options.stop if text.endswith(stop)]
        if found and said and len(lines) > (options.min_tokens or 0):
            stop_string = max(found, key=len)
            end = len(text) if options.include_stop_string else len(text) - len(stop_string)
            text, reason = text[:end], FinishReason.STOP
            break
    return ExpectedSequence(tuple(prefixes.token_ids[start:]), text, reason, stop_string, stop_token_id, tuple(lines))


def _prompt_lines(request: Generate, model: int) -> tuple[Line, ...]:
    count = request.options.prompt_logprobs
    if count is None:
        return ()
    mixes = mixed_prefixes(Prefixes(request.prompt, digest_of(request.adapter)).hashes(0, len(request.prompt)), model)
    lines = (line_of(mix, token_id, count) for mix, token_id in zip(mixes, request.prompt[1:], strict=False))
    return tuple(lines)[(request.options.prompt_logprobs_start or 1) - 1 :]


@dataclass(frozen=True, slots=True)
class _Beam:
    token_ids: tuple[int, ...]
    logprob: float
    lines: tuple[Line, ...] = ()


def _beams(request: Generate, model: int) -> tuple[ExpectedSequence, ...]:
    """Searches as transformers does: one list of all beams' candidates; the best ones that do not end continue."""
    options, ending = request.options, _ending(request.options)
    search, pattern = options.beam_search, "" if options.constraint is None else options.constraint.regex or ""
    assert search is not None
    width, penalty = search.beam_width, 1.0 if search.length_penalty is None else search.length_penalty
    most, adapter = max(2, 1 + len(ending)) * width, digest_of(request.adapter)
    beams, finished = [_Beam((), 0.0)], list[tuple[float, _Beam, bool]]()
    for length in range(1, _max_tokens(request) + 1):
        is_last = length == _max_tokens(request)
        joined: list[tuple[float, int, int, _Beam]] = []
        for number, beam in enumerate(beams):
            position = len(request.prompt) + length - 1
            mix = mixed(Prefixes((*request.prompt, *beam.token_ids), adapter).hashes(0, position), model)
            for place, (token_id, logprob) in enumerate(zip(*candidates(mix, most, pattern), strict=True)):
                if logprob == -math.inf:
                    continue
                line = Line(logprob, place + 1, *candidates(mix, options.logprobs or 0))
                child = _Beam((*beam.token_ids, token_id), beam.logprob + logprob, (*beam.lines, line))
                joined.append((-child.logprob, number, place, child))
        likely = [each[3] for each in sorted(joined, key=lambda each: each[:3])][:most]
        for beam in likely[:width]:
            ends = beam.token_ids[-1] in ending
            if ends or is_last:
                finished.append((beam.logprob / length**penalty, beam, ends))
        # Among equal hypotheses, earlier ones stay.
        finished = sorted(finished, key=lambda each: -each[0])[:width]
        beams = [beam for beam in likely if beam.token_ids[-1] not in ending][:width]
        if is_last or not beams:
            break
        if len(finished) == width:
            hopeful = _max_tokens(request) if search.early_stopping is EarlyStopping.NEVER and penalty > 0 else length
            if search.early_stopping is EarlyStopping.TRUE or beams[0].logprob / hopeful**penalty <= finished[-1][0]:
                break
    finished += [finished[-1]] * (width - len(finished))
    return tuple(_found(beam, ends) for _, beam, ends in finished[: request.num_returned])


def _found(beam: _Beam, ends: bool) -> ExpectedSequence:
    last = beam.token_ids[-1]
    text = _text(beam.token_ids[:-1] if ends else beam.token_ids)
    reason = FinishReason.STOP if ends else FinishReason.LENGTH
    return ExpectedSequence(beam.token_ids, text, reason, None, last if ends else None, beam.lines)
