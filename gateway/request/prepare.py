"""Prepares a request for submission: encodes its prompt, and completes its parameters. A chat determines the format of
the answer, and its tools and response format the constraint. A caller may already have tokens: the request continues
after them as after tokens of this gateway.
"""

import copy
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile

import numpy as np

from gateway.auth.caller import current_tenant
from gateway.replicas.generation_request import GenerationRequest, NamedAdapter
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import check_answer_size, num_prompt_logprobs
from gateway.request.limits import Limits
from gateway.request.parameters import CallParameters, drawn_seed, num_candidates
from gateway.request.served_model import ServedModel
from gateway.request.validation import resolve_max_tokens
from gateway.request.violations import Violations, renamed
from gateway.text.chat import Chat
from gateway.text.formats.answer import HARMONY, HARMONY_REASONING, PLAIN, THINKING_MARKS, AnswerFormat
from gateway.text.formats.grammars import (
    CallGrammar,
    ModelText,
    calls_or_answer,
    check_arguments,
    constrained_calls,
    format_of_forced_calls,
)
from gateway.text.formats.harmony import AFTER_ANALYSIS, ANALYSIS, FINAL
from gateway.text.formats.notations import text_parameters
from gateway.text.formats.parser import OfferedTool, Thinking
from gateway.turns import TOKENS_PER_TURN, Turns
from gateway.types import ChatPrompt, HeldSequence, Prompt, RequestOptions, TextPrompt, TokenPrompt
from quire.common.v1.common_pb2 import Constraint, StructuralTag
from quire.constraints.json_schema import ConstraintError, read_schema
from quire.gateway.v1.generation_pb2 import (
    TOOL_CHOICE_MODE_NONE,
    TOOL_CHOICE_MODE_REQUIRED,
    Tool,
    ToolChoice,
)
from quire.messages.prefix_hashes import salt_digest
from quire.rpc.errors import InvalidArgument, QuireError, invalid_field
from quire.runtime import entropy
from quire.tracing import TraceContext

# Larger schemas are read in a thread.
_INLINE_BYTES = 8192


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
    num_sequences = num_candidates(options.sampling)
    max_tokens = resolve_max_tokens(encoded.field, token_ids, asked_max_tokens, num_sequences, limits)
    try:
        parameters = await call.complete(options, model, limits, tenant)
    except QuireError as error:
        if not encoded.constraint_field:
            raise
        raise renamed(error, partial(_field_of_constraint, encoded.constraint_field)) from error
    stopping = parameters.stopping
    if stopping.max_tokens != max_tokens:
        stopping = copy.deepcopy(stopping)
        stopping.max_tokens = max_tokens
    await turns.pause()
    request = GenerationRequest(
        request_id=request_id,
        tenant=tenant,
        prompt_token_ids=np.asarray(token_ids, dtype=np.int32),
        sampling=parameters.sampling,
        stopping=stopping,
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
    await check_continuation(options, request, limits)
    return request


@dataclass(frozen=True, slots=True)
class _PreparedChat:
    """A prepared chat. `constraint` is None if only `sampling.constraint` applies, or no constraint at all."""

    token_ids: list[int]
    answer_format: AnswerFormat
    constraint: Constraint | None


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
    if options.cuts_text and len(encoded.token_ids) > limits.max_prompt_tokens:
        return replace(
            encoded, token_ids=_cut(encoded.token_ids, limits.max_prompt_tokens, model, options.cuts_text == "start")
        )
    if (kept := options.truncate_prompt_tokens) is None:
        return encoded
    num_kept, token_ids = limits.max_prompt_tokens if kept == -1 else kept, encoded.token_ids
    token_ids = token_ids[:num_kept] if options.truncation_side == "right" else token_ids[-num_kept:]
    return replace(encoded, token_ids=token_ids)


def _cut(token_ids: Sequence[int], length: int, model: ServedModel, cuts_start: bool) -> list[int]:
    """The first tokens, with the special tokens that the tokenizer has put behind the text, or what the template of
    pairs has. With `cuts_start`, the last tokens, with the special tokens in front of the text."""
    special = frozenset(model.tokenizer.special_tokens.values())
    if cuts_start:
        front = list(takewhile(lambda each: each in special, token_ids))[: length - 1]
        return [*front, *token_ids[len(token_ids) - length + len(front) :]]
    behind = list(takewhile(lambda each: each in special, reversed(token_ids)))[::-1]
    if model.pairs is not None and model.pairs.ending:
        behind = list(model.pairs.ending)
    behind = behind[-(length - 1) :]
    return [*token_ids[: length - len(behind)], *behind]


async def _encoded_chat(options: RequestOptions, prompt: ChatPrompt, model: ServedModel, limits: Limits) -> _Encoded:
    make = partial(_prepare_chat, model=model, is_constrained=options.sampling.HasField("constraint"))
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


async def _without_oldest(
    prompt: ChatPrompt, whole: _PreparedChat, make: Callable[[ChatPrompt], Awaitable[_PreparedChat]], longest: int
) -> _PreparedChat:
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


async def _prepare_chat(prompt: ChatPrompt, model: ServedModel, *, is_constrained: bool) -> _PreparedChat:
    """The prompt and the constraint of a checked chat. `is_constrained`: the caller gave a constraint of all text.

    Raises:
        InvalidArgument: the template refuses the conversation, or the model does not support these tools and format.
        ResourceExhausted: too much long work waits for a thread.
    """
    chat = model.chat
    text = await chat.render(prompt)
    thinking = chat.thinking_after(prompt, text)
    offered = _Offered.from_prompt(prompt)
    answer_format = AnswerFormat(
        _tool_format(chat, offered), chat.reasoning_format, thinking, offered.parsed if offered else ()
    )
    constraint = None
    if not is_constrained:
        size = sum(len(tool.parameters) for tool in prompt.tools)
        size += 0 if prompt.response_format is None else prompt.response_format.ByteSize()
        try:
            if size <= _INLINE_BYTES:
                constraint = _constraint(prompt, offered, model)
            else:
                constraint = await model.executor.run(current_tenant(), size, _constraint, prompt, offered, model)
        except RecursionError as error:
            # The depth of JSON in a text is only limited by its parser, for values of keywords without schemas.
            raise invalid_field("tools", "have a schema with values that are nested too deeply") from error
    if constraint is not None and not constraint.HasField("begins_after"):
        must_match = prompt.response_format is not None or (offered is not None and offered.is_forced)
        opening = _set_beginning(constraint, answer_format, must_match=must_match)
        if opening:
            # The prompt fixes whether the model reasons: reasoning is unconstrained, and the text after it must match.
            text += opening
            answer_format = replace(answer_format, thinking=Thinking.BEGUN)
    return _PreparedChat(await chat.encode_text(text), answer_format, constraint)


@dataclass(frozen=True, slots=True)
class _Offered:
    """The tools that may be called. `is_forced`: at least one call is required; `is_single`: at most one is allowed."""

    tools: Sequence[tuple[int, Tool]]
    is_forced: bool
    is_single: bool

    @classmethod
    def from_prompt(cls, prompt: ChatPrompt) -> "_Offered | None":
        choice = prompt.tool_choice or ToolChoice()
        if not prompt.tools or choice.mode == TOOL_CHOICE_MODE_NONE:
            return None
        allowed = frozenset(choice.allowed) or {tool.name for tool in prompt.tools}
        tools = [(place, tool) for place, tool in enumerate(prompt.tools) if tool.name in allowed]
        if choice.WhichOneof("choice") == "name":
            return cls([(place, tool) for place, tool in tools if tool.name == choice.name], True, True)
        return cls(tools, choice.mode == TOOL_CHOICE_MODE_REQUIRED, not prompt.parallel_tool_calls)

    @property
    def parsed(self) -> tuple[OfferedTool, ...]:
        return tuple(OfferedTool(tool.name, text_parameters(tool.parameters)) for _, tool in self.tools)

    def grammars(self, tool_format: str | None) -> list[CallGrammar]:
        """The grammars of calls in a format. Raises InvalidArgument if a schema must be enforced and cannot be."""
        return [self._grammar(place, tool, tool_format) for place, tool in self.tools]

    def _grammar(self, place: int, tool: Tool, tool_format: str | None) -> CallGrammar:
        if not tool.parameters:
            return CallGrammar(tool.name, '{"type": "object", "properties": {}, "additionalProperties": false}')
        if tool.HasField("strict") and not tool.strict and not self.is_forced:
            return CallGrammar(tool.name)
        field = f"tools[{place}].parameters"
        try:
            schema = tool.parameters
            if "type" not in read_schema(field, schema):
                # Arguments are an object, even if the schema does not require it.
                schema = json.dumps({"type": "object"} | json.loads(schema))
            check_arguments(format_of_forced_calls(tool_format) if self.is_forced else tool_format, schema)
        except ConstraintError as error:
            if self.is_forced or tool.strict:
                raise invalid_field(field, error.description) from error
            # A schema that cannot be enforced is left to the model, unless `strict` requires it.
            return CallGrammar(tool.name)
        return CallGrammar(tool.name, schema)


def _tool_format(chat: Chat, offered: _Offered | None) -> str | None:
    if offered is None:
        return None
    if offered.is_forced:
        return format_of_forced_calls(chat.tool_format)
    if chat.tool_format is None:
        raise InvalidArgument(
            "tools cannot be used: the format of this model's calls cannot be derived from its chat template; set "
            "tool_choice to required or to a tool, or start the gateway with --tool-call-parser",
            reason="NO_TOOL_FORMAT",
        )
    return chat.tool_format


def _constraint(prompt: ChatPrompt, offered: _Offered | None, model: ServedModel) -> Constraint | None:
    answer, chat = prompt.response_format, model.chat
    if offered is None:
        return copy.deepcopy(answer)
    texts = ModelText(chat.call_shape, model.tokenizer.special_tokens)
    grammars = offered.grammars(chat.tool_format)
    calls = constrained_calls(
        chat.tool_format, grammars, texts, is_forced=offered.is_forced, is_single=offered.is_single
    )
    if offered.is_forced or answer is None:
        return calls
    if answer.HasField("json_schema"):
        try:
            read_schema("response_format.json_schema", answer.json_schema)
        except ConstraintError as error:
            raise invalid_field(error.field, error.description) from error
    if chat.tool_format == HARMONY and calls is not None and answer.WhichOneof("kind") == "json_schema":
        calls.structural_tags.tags.append(StructuralTag(begin=FINAL, json_schema=answer.json_schema))
        calls.structural_tags.required = True
        if answer.no_white_space:
            calls.no_white_space = True
        return calls
    if calls is not None:
        both = calls_or_answer(chat.tool_format, grammars, texts, answer, is_single=offered.is_single)
        if both is not None:
            return both
    raise invalid_field(
        "response_format", "cannot be combined with tools that the model may call; leave one of the two out"
    )


def _set_beginning(constraint: Constraint, answer_format: AnswerFormat, *, must_match: bool) -> str:
    """Sets where a constraint begins; returns the text that the prompt must end with.

    If the model were free to reason or not, either the constraint or the reasoning would be lost.
    """
    if answer_format.reasoning_format == HARMONY_REASONING:
        if constraint.WhichOneof("kind") != "structural_tags":
            constraint.begins_after = FINAL
        elif constraint.structural_tags.no_free_text:
            constraint.begins_after = AFTER_ANALYSIS
            return ANALYSIS
        return ""
    marks = THINKING_MARKS.get(answer_format.reasoning_format or "")
    if marks is None or answer_format.thinking is Thinking.NONE:
        return ""
    has_begun = answer_format.thinking is Thinking.BEGUN
    if has_begun or must_match:
        constraint.begins_after = marks.end
    return marks.opening if must_match and not has_begun else ""


async def check_continuation(options: RequestOptions, request: GenerationRequest, limits: Limits) -> None:
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
