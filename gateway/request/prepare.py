"""Prepares a request for submission: encodes its prompt, and completes its parameters."""

import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gateway.replicas.generation_request import GenerationRequest, NamedAdapter
from gateway.request.answer_memory import check_answer_size
from gateway.request.chats import PreparedChat, prepare_chat
from gateway.request.continuation import check_continuation
from gateway.request.limits import Limits
from gateway.request.parameters import CallParameters, drawn_seed, num_candidates
from gateway.request.served_model import ServedModel
from gateway.request.validation import resolve_max_tokens
from gateway.request.violations import renamed
from gateway.text.formats.answer import PLAIN, AnswerFormat
from gateway.turns import Turns
from gateway.types import ChatPrompt, Prompt, RequestOptions, TextPrompt, TokenPrompt
from quire.messages.prefix_hashes import salt_digest
from quire.rpc.errors import QuireError, invalid_field
from quire.runtime import entropy
from quire.tracing import TraceContext


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
