"""Prepares a request for submission: tokenizes the prompt and bad words, sets every default, and adds the tokens that
the caller already has."""

import copy
import math
from collections.abc import Awaitable, Callable, MutableSequence, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gateway.replicas.generation_request import GenerationRequest, NamedAdapter, Parameters
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import check_answer_size, num_prompt_logprobs
from gateway.request.chats import PreparedChat, prepare_chat
from gateway.request.generation_config import NO_DEFAULTS, ModelDefaults
from gateway.request.limits import DRAWING, NUMBERS, Limits
from gateway.request.served_model import ServedModel
from gateway.request.validation import check_another, check_request, resolve_max_tokens
from gateway.request.violations import Violations, renamed
from gateway.text.formats.answer import PLAIN, AnswerFormat, thinking_marks_of
from gateway.text.tokenizer import Tokenizer
from gateway.turns import TOKENS_PER_TURN, Turns
from gateway.types import ChatPrompt, HeldSequence, Prompt, RequestOptions, TextPrompt, TokenPrompt
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
from quire.messages.prefix_hashes import salt_digest
from quire.rpc.errors import QuireError, invalid_field
from quire.runtime import entropy
from quire.tracing import TraceContext

# The contract's own defaults.
_SAMPLING = SamplingParameters()
for _name, _number in NUMBERS.items():
    setattr(_SAMPLING, _name, _number.default)
# Fields that only the scheduler or the gateway reads.
_NOT_FOR_WORKERS = ("seed", "n", "best_of", "beam_search", "bad_words", "thinking_token_budget")


class CallParameters:
    """The common parameters of the requests of one call, checked and completed for the first of them.

    The parameters may be long, and a call may make a thousand requests.
    """

    def __init__(self) -> None:
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
        parameters = replace(parameters, predicted=predicted)
        await turns.pause()
        check_choice(parameters, bad_sequences, model.defaults)
        if thinking is not None:
            check_thinking(parameters, bad_sequences, thinking)
        if options.sampling.HasField("constraint"):
            check_end(options, parameters)
            await model.constraints.check(options.sampling.constraint, tenant)
        self._options, self._parameters = options, parameters
        return parameters

    def _known(self, options: RequestOptions) -> Parameters | None:
        """The completed parameters, if a request has the same objects as the one before it."""
        before = self._options
        if before is None or (options.model, options.priority) != (before.model, before.priority):
            return None
        names = ("sampling", "stopping", "output")
        is_same = all(getattr(options, name) is getattr(before, name) for name in names)
        return self._parameters if is_same else None


async def prepare(
    options: RequestOptions,
    call: CallParameters,
    model: ServedModel,
    limits: Limits,
    *,
    request_id: str,
    tenant: str,
    priority: int,
    trace: TraceContext | None,
    adapter: NamedAdapter | None = None,
) -> GenerationRequest:
    """A request, which `call` has checked, as it is submitted.

    Raises:
        InvalidArgument: its prompt is too long, its answer too large, or the caller's tokens cannot be its output.
        ResourceExhausted: too many long texts wait to be tokenized.
    """
    turns = Turns()
    encoded = await _encoded(options, model, limits)
    options, token_ids = encoded.options, encoded.token_ids
    if options.output.prompt_logprobs_start >= max(len(token_ids), 2):
        start = options.output.prompt_logprobs_start
        raise invalid_field(
            "output.prompt_logprobs_start",
            f"is {start:,}; it must be the position of a prompt token, below {len(token_ids):,}",
        )
    asked_max_tokens = options.asked("stopping.max_tokens")
    if limits.clamps(options) and len(token_ids) + asked_max_tokens > limits.max_model_len:
        # As if max_tokens were absent: the rest of the context.
        asked_max_tokens = None
    candidates = _num_candidates(options.sampling)
    max_tokens = resolve_max_tokens(encoded.field, token_ids, asked_max_tokens, candidates, limits)
    try:
        parameters = await call.complete(options, model, limits, tenant)
    except QuireError as error:
        if not encoded.constraint_field:
            raise
        raise renamed(error, partial(_field_of_constraint, encoded.constraint_field)) from error
    await turns.pause()
    request = GenerationRequest(
        request_id=request_id,
        tenant=tenant,
        prompt_token_ids=np.asarray(token_ids, dtype=np.int32),
        sampling=parameters.sampling,
        stopping=_with_max_tokens(parameters.stopping, max_tokens),
        output=parameters.output,
        seed=drawn_seed(options.sampling),
        eos_token_ids=parameters.eos_token_ids,
        row_sampling=parameters.row_sampling,
        predicted=parameters.predicted,
        priority=priority,
        expected_tokens=options.expected_tokens,
        durable=options.durable,
        cache_salt=salt_digest(options.cache_salt or ""),
        front_end=options.front_end,
        is_steady=options.is_steady or bool(options.front_end),
        answer_format=encoded.answer_format,
        nonce=entropy.random_bits(64),
        trace=trace,
        adapter=adapter,
    )
    check_answer_size(request)
    await _check_continuation(options, request, limits)
    return request


@dataclass(frozen=True, slots=True)
class _Encoded:
    """The tokens of a prompt, from the caller's `field`, and the request with the constraint that its chat makes of
    `constraint_field`."""

    options: RequestOptions
    field: str
    token_ids: Sequence[int]
    answer_format: AnswerFormat = PLAIN
    constraint_field: str = ""


async def _encoded(options: RequestOptions, model: ServedModel, limits: Limits) -> _Encoded:
    if isinstance(options.prompt, ChatPrompt):
        encoded = await _encoded_chat(options, options.prompt, model, limits)
    else:
        encoded = _Encoded(options, *await encode_prompt(options.prompt, model))
    if (kept := options.truncate_prompt_tokens) is None:
        return encoded
    num_kept, token_ids = limits.max_prompt_tokens if kept == -1 else kept, encoded.token_ids
    token_ids = token_ids[:num_kept] if options.truncation_side == "right" else token_ids[-num_kept:]
    return replace(encoded, token_ids=token_ids)


async def _encoded_chat(options: RequestOptions, prompt: ChatPrompt, model: ServedModel, limits: Limits) -> _Encoded:
    make = partial(
        prepare_chat,
        chat=model.chat,
        tokenizer=model.tokenizer,
        executor=model.executor,
        is_constrained=options.sampling.HasField("constraint"),
    )
    chat = await make(prompt)
    if prompt.drops_turns:
        # The tokens that a prompt may have next to the requested output, if that is not cut down.
        output = 0 if limits.clamps(options) else options.asked("stopping.max_tokens") or 0
        longest = min(limits.max_prompt_tokens, limits.max_model_len - output)
        chat = await _without_oldest(prompt, chat, make, longest)
    encoded = _Encoded(options, "messages", chat.token_ids, chat.answer_format)
    if chat.constraint is None:
        return encoded
    field = "response_format" if prompt.response_format is not None else "tools"
    sampling = copy.deepcopy(options.sampling)
    sampling.constraint.CopyFrom(chat.constraint)
    return replace(encoded, options=replace(options, sampling=sampling), constraint_field=field)


def _with_max_tokens(stopping: StoppingParameters, max_tokens: int) -> StoppingParameters:
    if stopping.max_tokens == max_tokens:
        return stopping
    changed = StoppingParameters()
    changed.CopyFrom(stopping)
    changed.max_tokens = max_tokens
    return changed


async def _without_oldest(
    prompt: ChatPrompt, whole: PreparedChat, make: Callable[[ChatPrompt], Awaitable[PreparedChat]], longest: int
) -> PreparedChat:
    """The chat without its oldest turns, as few as possible, so that the prompt has at most `longest` tokens. A turn
    begins with a message of the user; instructions before the first one, and the last turn, stay. If those are too long
    by themselves, the last chat that was tried is returned."""
    messages = prompt.messages
    turns = [place for place, message in enumerate(messages) if message.role == "user"]
    low, high, found = 1, len(turns) - 1, whole
    if len(whole.token_ids) <= longest:
        return whole
    while low <= high:
        middle = (low + high) // 2
        chat = await make(replace(prompt, messages=[*messages[: turns[0]], *messages[turns[middle] :]]))
        if len(chat.token_ids) <= longest:
            high, found = middle - 1, chat
        else:
            low = middle + 1
            found = chat if len(found.token_ids) > longest else found
    return found


def _field_of_constraint(name: str, field: str) -> str:
    """The caller's name of a field of the constraint that a chat has made of `name`."""
    if not field.startswith("sampling.constraint"):
        return field
    return name + field.removeprefix("sampling.constraint") if name == "response_format" else name


async def encode_prompt(prompt: Prompt | None, model: ServedModel) -> tuple[str, Sequence[int]]:
    """The name of the field that holds the prompt, and its token ids."""
    match prompt:
        case TextPrompt(text, add_special_tokens):
            return "text", await model.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        case TokenPrompt(token_ids=token_ids):
            return "token_ids.ids", token_ids
        case ChatPrompt():
            return "messages", await model.chat.encode(prompt)
        case None:
            raise AssertionError("the validator refuses a missing prompt")


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
    _keep_each_once(stopping.stop_token_ids)
    _keep_each_once(output.logprob_token_ids)
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


def _num_candidates(sampling: SamplingParameters) -> int:
    """The number of sequences from which the returned ones are chosen."""
    if sampling.HasField("beam_search"):
        return sampling.beam_search.beam_width
    return sampling.best_of or sampling.n or 1


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


def _sampling(asked: SamplingParameters, model_defaults: SamplingParameters) -> SamplingParameters:
    sampling = SamplingParameters()
    for message in (_SAMPLING, model_defaults, asked):
        sampling.MergeFrom(message)
    sampling.ClearField("seed")
    sampling.n = asked.n or 1
    sampling.best_of = _num_candidates(asked)
    if asked.HasField("beam_search"):
        # The model's default sampling parameters do not apply.
        for name, value in DRAWING.items():
            setattr(sampling, name, value)
        beam = sampling.beam_search
        beam.length_penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
        beam.early_stopping = beam.early_stopping or EARLY_STOPPING_FALSE
    _keep_each_once(sampling.allowed_token_ids)
    return sampling


def _keep_each_once(token_ids: MutableSequence[int]) -> None:
    distinct = dict.fromkeys(token_ids[:])
    if len(distinct) < len(token_ids):
        token_ids[:] = distinct


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


async def _check_continuation(options: RequestOptions, request: GenerationRequest, limits: Limits) -> None:
    """Raises InvalidArgument if the tokens that the caller holds cannot be tokens of this request."""
    held = options.continue_from
    if not held:
        return
    violations, turns = Violations(), Turns()
    if len(held) != (count := request.sampling.n):
        violations.add("continue_from", f"has {len(held)} entries; the request has {count:,} sequences, each has one")
    for position, sequence in enumerate(held):
        _check_sequence(violations, f"continue_from[{position}]", sequence, request, limits)
        await turns.pause()
    if any(sequence.token_ids for sequence in held):
        if request.chooses:
            violations.add(
                "continue_from",
                "has tokens; if sequences are selected at the end, none is delivered earlier: send a new request",
            )
        elif request.sampling.temperature and not options.sampling.HasField("seed"):
            violations.add(
                "sampling.seed", "is absent; to continue after sampled tokens, send the seed of the first request"
            )
    violations.raise_if_any()


async def continue_from(live: LiveRequest, held: Sequence[HeldSequence]) -> None:
    """Puts the tokens that the caller holds into a request that was not submitted yet; the caller does not get them
    again. If they end all sequences, the request is over.

    A scheduler continues from these tokens as it continues from a gateway's tokens after it has lost its own state:
    prompt, parameters, seed and tokens are the whole state of a request. Equal logits give an equal continuation.
    Log probabilities of the prompt come with its first token, so a request for them begins there; the caller still
    does not get again the tokens that it holds.

    Raises:
        InvalidArgument: a sequence had ended before its last token.
    """
    turns = Turns()
    begins_anew = bool(num_prompt_logprobs(live.request))
    for position, (stream, sequence) in enumerate(zip(live.sequences, held, strict=True)):
        token_ids = sequence.token_ids
        stream.skip(len(token_ids), sequence.num_characters, cumulative_logprob=sequence.cumulative_logprob)
        if begins_anew:
            continue
        for begin in range(0, len(token_ids), TOKENS_PER_TURN):
            stream.accept(begin, token_ids[begin : begin + TOKENS_PER_TURN])
            await turns.pause()
        if len(stream.token_ids) < len(token_ids):
            assert stream.finished is not None, "a stream takes all tokens up to its end"
            raise invalid_field(
                f"continue_from[{position}].token_ids",
                f"has {len(token_ids):,} tokens; the sequence ended with token {len(stream.token_ids):,} by the stop "
                f"string {stream.finished.stop_string!r:.80}",
            )
        stream.drop_skipped()
    live.num_brought_tokens = live.num_generated_tokens
    live.end_if_complete()


def _check_sequence(
    violations: Violations, field: str, sequence: HeldSequence, request: GenerationRequest, limits: Limits
) -> None:
    token_ids, max_tokens = sequence.token_ids, request.stopping.max_tokens
    if len(token_ids) > max_tokens:
        violations.add(f"{field}.token_ids", f"has {len(token_ids):,} tokens; max_tokens is {max_tokens:,}")
        return
    violations.check_token_ids(f"{field}.token_ids", token_ids, limits.vocab_size)
    before_the_last, ending = token_ids[:-1], request.ending_token_ids
    if not ending.isdisjoint(before_the_last):
        place = next(place for place, token_id in enumerate(before_the_last) if token_id in ending)
        description = f"is {token_ids[place]}, which ends a sequence; tokens follow it"
        violations.add(f"{field}.token_ids[{place}]", description)
    if sequence.cumulative_logprob is not None and not math.isfinite(sequence.cumulative_logprob):
        violations.add(f"{field}.cumulative_logprob", f"is {sequence.cumulative_logprob}; it must be finite")
