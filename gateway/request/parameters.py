"""The parameters of requests: every default set, bad words and predictions as tokens, contradictions refused."""

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, replace

from gateway.replicas.generation_request import Parameters
from gateway.request.generation_config import NO_DEFAULTS, ModelDefaults
from gateway.request.limits import DRAWING, NUMBERS, Limits
from gateway.request.served_model import ServedModel
from gateway.request.validation import check_another, check_request
from gateway.request.violations import Violations
from gateway.text.formats.answer import thinking_marks_of
from gateway.text.tokenizer import Tokenizer
from gateway.turns import Turns
from gateway.types import RequestOptions
from quire.common.v1.common_pb2 import (
    EARLY_STOPPING_FALSE,
    OutputOptions,
    RowSampling,
    SamplingParameters,
    StoppingParameters,
    ThinkingLimit,
    TokenIds,
)
from quire.messages.arrays import encode_int32
from quire.rpc.errors import invalid_field
from quire.runtime import entropy

# The contract's own defaults.
_SAMPLING = SamplingParameters()
for _name, _number in NUMBERS.items():
    setattr(_SAMPLING, _name, _number.default)
# The messages of a request's options.
_MESSAGES = ("sampling", "stopping", "output")
# Fields that only the scheduler or the gateway reads.
_NOT_FOR_WORKERS = ("seed", "n", "best_of", "beam_search", "bad_words", "thinking_token_budget")


class CallParameters:
    """The common parameters of the requests of one call, checked and completed for the first of them.

    The parameters may be long, and a call may make a thousand requests.
    """

    def __init__(self, last: "LastParameters | None" = None) -> None:
        """`last` is shared by the calls of a model."""
        self._last = last or LastParameters()
        self._options: RequestOptions | None = None
        self._parameters: Parameters | None = None

    def check(self, options: RequestOptions, limits: Limits, served_model: str | None) -> None:
        """Validates a request. Parameters that equal the previous request's are not checked again.

        Raises:
            InvalidArgument: something is missing, out of range or contradictory.
        """
        if self._known(options) is None:
            check_request(options, limits, served_model)
        else:
            check_another(options, limits)

    async def complete(self, options: RequestOptions, model: ServedModel, limits: Limits, tenant: str) -> Parameters:
        """The parameters of a request that passed `check`.

        Raises:
            InvalidArgument: they exclude every token, or contain a constraint that cannot be enforced.
            ResourceExhausted: too many constraints wait to be checked.
        """
        if (known := self._known(options)) is not None:
            return known
        is_constrained = options.sampling.HasField("constraint")
        asked = [getattr(options, name).SerializeToString(deterministic=True) for name in _MESSAGES]
        parameters = self._last.parameters
        if parameters is None or is_constrained or self._last.asked != asked or self._last.limits is not limits:
            parameters = await self._completed(options, model, limits, tenant)
            if not is_constrained:
                self._last.asked, self._last.limits, self._last.parameters = asked, limits, parameters
        self._options, self._parameters = options, parameters
        return parameters

    async def _completed(self, options: RequestOptions, model: ServedModel, limits: Limits, tenant: str) -> Parameters:
        turns = Turns()
        bad_sequences = await bad_token_sequences(model.tokenizer, options.sampling.bad_words, limits.vocab_size)
        await turns.pause()
        predicted: Sequence[int] = ()
        if options.output.prediction:
            encoded = await _encoded_answer(model.tokenizer, options.output.prediction)
            predicted = tuple(each for each in encoded[: limits.max_model_len] if each < limits.vocab_size)
        thinking = await thinking_limit(options.sampling, model, limits.vocab_size)
        rules = model.defaults.rules(limits.vocab_size)
        parameters = resolve(options, model.defaults, model.eos_token_ids, bad_sequences, thinking, rules)
        if predicted:
            parameters = replace(parameters, predicted=predicted)
        await turns.pause()
        check_choice(parameters, bad_sequences, model.defaults)
        if thinking is not None:
            check_thinking(parameters, bad_sequences, thinking)
        if options.sampling.HasField("constraint"):
            check_end(options, parameters)
            await model.constraints.check(options.sampling.constraint, tenant)
        return parameters

    def _known(self, options: RequestOptions) -> Parameters | None:
        """The completed parameters, if a request has the same objects as the one before it."""
        before = self._options
        if before is None or (options.model, options.priority) != (before.model, before.priority):
            return None
        is_same = all(getattr(options, name) is getattr(before, name) for name in _MESSAGES)
        return self._parameters if is_same else None


@dataclass(slots=True)
class LastParameters:
    """The last completed parameters of a model without a constraint, which most requests repeat."""

    asked: Sequence[bytes] = ()
    limits: Limits | None = None
    parameters: Parameters | None = None


def resolve(
    options: RequestOptions,
    defaults: ModelDefaults,
    eos_token_ids: tuple[int, ...],
    bad_sequences: Sequence[Sequence[int]] = (),
    thinking: ThinkingLimit | None = None,
    rules: RowSampling | None = None,
) -> Parameters:
    """The parameters of valid options. `bad_sequences` are the bad words as tokens, `thinking` limits the reasoning,
    `rules` are the model's for all rows."""
    sampling = _sampling(options.sampling, defaults.sampling)
    stopping = StoppingParameters(min_tokens=0, ignore_eos=False, include_stop_string=False)
    stopping.MergeFrom(defaults.stopping)
    if options.stopping.stop or sampling.HasField("beam_search") or sampling.best_of > sampling.n:
        # Sequences that are selected at the end have no stop strings.
        stopping.ClearField("stop")
    stopping.MergeFrom(options.stopping)
    output = OutputOptions(include_special_tokens=False)
    output.MergeFrom(options.output)
    output.ClearField("prediction")
    _drop_repeats(stopping.stop_token_ids)
    _drop_repeats(output.logprob_token_ids)
    if output.logprob_token_ids:
        output.logprobs = len(output.logprob_token_ids)
    ending = () if stopping.ignore_eos else eos_token_ids
    row = RowSampling(
        sampling=sampling,
        bad_token_sequences=[TokenIds(ids=each) for each in bad_sequences],
        logprob_token_ids=encode_int32(output.logprob_token_ids),
        thinking=thinking,
    )
    row.MergeFrom(rules or RowSampling())
    for name in _NOT_FOR_WORKERS:
        row.sampling.ClearField(name)
    row.stopping.min_tokens = stopping.min_tokens
    row.stopping.stop_token_ids.extend({*stopping.stop_token_ids, *ending})
    row_sampling = row.SerializeToString(deterministic=True)
    if sampling.HasField("constraint"):
        # Only the worker delays the end, because a text that cannot continue ends before min_tokens.
        stopping.min_tokens = 0
    return Parameters(sampling, stopping, output, ending, row_sampling)


def _sampling(asked: SamplingParameters, model_defaults: SamplingParameters) -> SamplingParameters:
    sampling = SamplingParameters()
    for message in (_SAMPLING, model_defaults, asked):
        sampling.MergeFrom(message)
    sampling.ClearField("seed")
    sampling.n = asked.n or 1
    sampling.best_of = num_candidates(asked)
    if asked.HasField("beam_search"):
        # The model's default sampling parameters do not apply.
        for name, value in DRAWING.items():
            setattr(sampling, name, value)
        beam = sampling.beam_search
        beam.length_penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
        beam.early_stopping = beam.early_stopping or EARLY_STOPPING_FALSE
    _drop_repeats(sampling.allowed_token_ids)
    return sampling


def num_candidates(sampling: SamplingParameters) -> int:
    """The number of sequences from which the returned ones are chosen."""
    if sampling.HasField("beam_search"):
        return sampling.beam_search.beam_width
    return sampling.best_of or sampling.n or 1


def _drop_repeats(token_ids: MutableSequence[int]) -> None:
    distinct = dict.fromkeys(token_ids[:])
    if len(distinct) < len(token_ids):
        token_ids[:] = distinct


def drawn_seed(sampling: SamplingParameters) -> int:
    """The seed of a request: its own, or a new random one."""
    return sampling.seed if sampling.HasField("seed") else entropy.random_bits(64)


async def _encoded_answer(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that follows a prompt."""
    token_ids = await tokenizer.encode(text, add_special_tokens=False)
    if text.startswith(" "):
        # SentencePiece's tokenizers add a space to the beginning of a text, which then has one too many.
        rest = await tokenizer.encode(text[1:], add_special_tokens=False)
        if rest == token_ids[1:] and rest and tokenizer.token_texts.text_of(rest[0]).startswith(" "):
            return rest
    return token_ids


async def bad_token_sequences(
    tokenizer: Tokenizer, bad_words: Sequence[str], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell the words: each word at the start of a text and after a space, each sequence once.

    A tokenizer may have more tokens than the model has logits (`vocab_size`). The model cannot generate a sequence with
    such a token, so it is left out.

    Raises:
        InvalidArgument: a word has no tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for position, word in enumerate(bad_words):
        text = word.lstrip() or word
        for spelled in (text, f" {text}"):
            token_ids = tuple(await tokenizer.encode(spelled, add_special_tokens=False))
            if not token_ids:
                raise invalid_field(f"sampling.bad_words[{position}]", "has no tokens; at least 1 is needed")
            if max(token_ids) < vocab_size:
                sequences[token_ids] = None
    return tuple(sequences)


async def thinking_limit(sampling: SamplingParameters, model: ServedModel, vocab_size: int) -> ThinkingLimit | None:
    """The limit on the reasoning; None if it is not limited, or if the model's answers have no reasoning."""
    marks = thinking_marks_of(model.chat.reasoning_format)
    if marks is None or not sampling.HasField("thinking_token_budget"):
        return None
    end_token_ids = await model.tokenizer.encode(marks.end, add_special_tokens=False)
    if not end_token_ids or max(end_token_ids) >= vocab_size:
        return None
    # A label may follow the mark; only the reasoning's channel has this label.
    begin = marks.begin + marks.label
    budget = sampling.thinking_token_budget
    return ThinkingLimit(max_tokens=budget, begin=begin, end=marks.end, end_token_ids=end_token_ids)


def check_choice(
    parameters: Parameters, bad_sequences: Sequence[Sequence[int]], defaults: ModelDefaults = NO_DEFAULTS
) -> None:
    """Raises InvalidArgument if all allowed tokens are bad words, excluded by the model, or end the sequence before
    min_tokens."""
    allowed, stopping = parameters.sampling.allowed_token_ids, parameters.stopping
    if not allowed:
        return
    excluded = {sequence[0] for sequence in bad_sequences if len(sequence) == 1}.union(defaults.never_generated)
    if stopping.min_tokens:
        excluded.update(stopping.stop_token_ids, parameters.eos_token_ids)
    if excluded.issuperset(allowed[:]):
        raise invalid_field(
            "sampling.allowed_token_ids",
            f"leaves nothing to choose: all of its {len(allowed):,} tokens are bad words, end the sequence before "
            f"min_tokens, which is {stopping.min_tokens:,}, or are excluded by the model's generation_config.json",
        )


def check_end(options: RequestOptions, parameters: Parameters) -> None:
    """Raises InvalidArgument if no token can end a constrained text, or min_tokens contradicts another ending."""
    violations = Violations()
    if not parameters.eos_token_ids and not parameters.stopping.stop_token_ids:
        field, problem = "stopping.stop_token_ids", "is empty, and the model has no eos id"
        way_out = "a text with sampling.constraint needs a token to end with"
        if parameters.stopping.ignore_eos:
            field, problem = "stopping.ignore_eos", "is true"
            way_out = "a text with sampling.constraint ends when it is complete: leave it out, or set stop_token_ids"
        violations.add(field, f"{problem}; {way_out}")
    if options.asked("stopping.min_tokens") and parameters.stopping.stop:
        violations.add(
            "stopping.min_tokens",
            "cannot be used with both sampling.constraint and stop: the constraint may end a text before, and stop "
            "strings would too",
        )
    violations.raise_if_any()


def check_thinking(parameters: Parameters, bad_sequences: Sequence[Sequence[int]], thinking: ThinkingLimit) -> None:
    """Raises InvalidArgument if the mark that ends the reasoning must not be generated."""
    end, allowed = tuple(thinking.end_token_ids), parameters.sampling.allowed_token_ids
    violations = Violations()
    way_out = f"{thinking.end}, the mark that ends the reasoning after sampling.thinking_token_budget"
    if allowed and not set(end).issubset(allowed):
        violations.add("sampling.allowed_token_ids", f"lacks a token of {way_out}: add {sorted(set(end))}")
    pieces = {end[begin:stop] for stop in range(1, len(end) + 1) for begin in range(stop)}
    if not pieces.isdisjoint(map(tuple, bad_sequences)):
        violations.add("sampling.bad_words", f"has a part of {way_out}: leave it out")
    violations.raise_if_any()
