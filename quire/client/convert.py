"""Between the client's values and the messages of quire.gateway.v1."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, cast

from quire.client.fields import fill, put
from quire.client.types import (
    AnyChatMessage,
    BeamSearch,
    ChatMessage,
    EarlyStopping,
    FinishReason,
    GeneratedSequence,
    Generation,
    GenerationOptions,
    Limits,
    Logprob,
    Model,
    PinnedPrefix,
    PositionLogprobs,
    Replica,
    RequestCompleted,
    SequenceFinished,
    ServerInfo,
    StreamEvent,
    TokenChunk,
    Tokenization,
    Usage,
)
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.rpc.errors import Internal, invalid_field

GenerateMessage = TypeVar("GenerateMessage", generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)
ChatMessageT = TypeVar("ChatMessageT", generation_pb2.ChatRequest, generation_pb2.ChatStreamRequest)


class GenerationFields(TypedDict):
    """What a request to generate says besides its prompt and how to continue it."""

    model: str | None
    request_id: str | None
    priority: int | None


_FINISH_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
_EARLY_STOPPING = {
    EarlyStopping.FALSE: common_pb2.EARLY_STOPPING_FALSE,
    EarlyStopping.TRUE: common_pb2.EARLY_STOPPING_TRUE,
    EarlyStopping.NEVER: common_pb2.EARLY_STOPPING_NEVER,
}
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "n",
    "best_of",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
_STOPPING_FIELDS = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_string")
_OUTPUT_FIELDS = ("logprobs", "prompt_logprobs", "include_special_tokens")


def to_generate_request(
    message: GenerateMessage,
    prompt: str | Sequence[int],
    options: GenerationOptions | None,
    **fields: Unpack[GenerationFields],
) -> GenerateMessage:
    """Fills `message`, a new request of either kind, and returns it.

    Raises:
        InvalidArgument: a value does not fit its field, for example a negative token id.
        TypeError: the prompt is neither text nor token ids, or the options are no GenerationOptions.
    """
    if isinstance(prompt, str):
        fill(message, text=prompt)
    else:
        _check_is_sequence("prompt", prompt, "a str or a sequence of token ids")
        message.token_ids.SetInParent()
        fill(message.token_ids, ids=prompt)
    fill(message, **fields)
    _fill_options(message, options)
    return message


def to_chat_request(
    message: ChatMessageT,
    messages: Sequence[AnyChatMessage],
    options: GenerationOptions | None,
    **fields: Unpack[GenerationFields],
) -> ChatMessageT:
    """Fills `message`, a new request of either kind, and returns it.

    Raises:
        InvalidArgument: a value does not fit its field.
        TypeError: the messages are no messages, or the options no GenerationOptions.
    """
    _check_is_sequence("messages", messages, "a sequence of ChatMessage")
    _add_messages(message, "messages", messages)
    fill(message, **fields)
    _fill_options(message, options)
    return message


def to_tokenize_request(
    text_or_messages: str | Sequence[AnyChatMessage], *, add_special_tokens: bool | None, model: str | None
) -> generation_pb2.TokenizeRequest:
    request = generation_pb2.TokenizeRequest()
    if isinstance(text_or_messages, str):
        fill(request, text=text_or_messages)
    else:
        _check_is_sequence("text_or_messages", text_or_messages, "a str or a sequence of ChatMessage")
        request.chat.SetInParent()
        _add_messages(request.chat, "text_or_messages", text_or_messages)
    fill(request, model=model, add_special_tokens=add_special_tokens)
    return request


def to_detokenize_request(
    token_ids: Sequence[int], *, include_special_tokens: bool | None, model: str | None
) -> generation_pb2.DetokenizeRequest:
    request = generation_pb2.DetokenizeRequest()
    put(request, "token_ids", token_ids)
    fill(request, include_special_tokens=include_special_tokens, model=model)
    return request


def to_pin_request(
    prefix: str | Sequence[int] | Sequence[AnyChatMessage], *, time_to_live_ms: int | None, model: str | None
) -> prefix_pb2.PinPrefixRequest:
    """Raises as `to_generate_request`."""
    request = prefix_pb2.PinPrefixRequest()
    if isinstance(prefix, str):
        fill(request, text=prefix)
    else:
        _check_is_sequence("prefix", prefix, "a str, a sequence of token ids or a sequence of ChatMessage")
        _add_ids_or_messages(request, list(prefix))
    fill(request, time_to_live_ms=time_to_live_ms, model=model)
    return request


def to_unpin_request(pin_id: str) -> prefix_pb2.UnpinPrefixRequest:
    request = prefix_pb2.UnpinPrefixRequest()
    put(request, "pin_id", pin_id)
    return request


def _check_is_sequence(name: str, value: object, limit: str) -> None:
    """TypeError where a value is not one of several entries."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r:.80}; it must be {limit}")


def _add_ids_or_messages(request: prefix_pb2.PinPrefixRequest, entries: list[int | AnyChatMessage]) -> None:
    if entries and all(isinstance(entry, ChatMessage | Mapping) for entry in entries):
        _add_messages(request.chat, "prefix", cast(list[AnyChatMessage], entries))
    else:
        request.token_ids.SetInParent()
        fill(request.token_ids, ids=entries)


def _add_messages(message: Any, name: str, messages: Iterable[AnyChatMessage]) -> None:
    """`name` is what the caller knows the messages by."""
    for index, entry in enumerate(messages):
        path = f"{name}[{index}]"
        given = _chat_message(path, entry)
        added = message.messages.add()
        put(added, "role", given.role, f"{path}.role")
        put(added, "content", given.content, f"{path}.content")


def _chat_message(path: str, entry: AnyChatMessage) -> ChatMessage:
    if isinstance(entry, ChatMessage):
        return entry
    if isinstance(entry, Mapping) and set(entry) == {"role", "content"}:
        return ChatMessage(entry["role"], entry["content"])
    limit = 'a ChatMessage, or a mapping of "role" and "content" alone'
    raise TypeError(f"{path} is {entry!r:.80}; it must be {limit}")


def _fill_options(message: Any, options: GenerationOptions | None) -> None:
    if options is None:
        return
    if not isinstance(options, GenerationOptions):
        raise TypeError(f"options is {options!r:.80}; it must be a GenerationOptions")
    fill(message.sampling, **{name: getattr(options, name) for name in _SAMPLING_FIELDS})
    fill(message.stopping, **{name: getattr(options, name) for name in _STOPPING_FIELDS})
    fill(message.output, **{name: getattr(options, name) for name in _OUTPUT_FIELDS})
    if options.beam_search is not None:
        _fill_beam_search(message.sampling.beam_search, options.beam_search)


def _fill_beam_search(message: common_pb2.BeamSearchParameters, beam: BeamSearch) -> None:
    if not isinstance(beam, BeamSearch):
        raise invalid_field("beam_search", f"is {beam!r:.80}; it must be a BeamSearch")
    early_stopping = None if beam.early_stopping is None else _early_stopping(beam.early_stopping)
    fill(message, beam_width=beam.beam_width, length_penalty=beam.length_penalty, early_stopping=early_stopping)


def _early_stopping(value: EarlyStopping) -> common_pb2.EarlyStopping:
    try:
        return _EARLY_STOPPING[EarlyStopping(value)]
    except ValueError as error:
        limit = f"one of EarlyStopping: {', '.join(EarlyStopping)}"
        raise invalid_field("early_stopping", f"is {value!r:.80}; it must be {limit}") from error


def from_generate_response(
    message: generation_pb2.GenerateResponse | generation_pb2.ChatResponse,
) -> Generation:
    return Generation(
        request_id=message.request_id,
        model=message.model,
        sequences=tuple(_sequence(sequence) for sequence in message.sequences),
        usage=_usage(message.usage),
        prompt_logprobs=_positions(message.prompt_logprobs),
    )


def from_stream_response(
    message: generation_pb2.GenerateStreamResponse | generation_pb2.ChatStreamResponse,
) -> StreamEvent:
    """Internal when the message holds no event that this client knows."""
    match message.WhichOneof("event"):
        case "chunk":
            return _chunk(message.chunk)
        case "finished":
            return _finished(message.finished)
        case "completed":
            return _completed(message.completed)
    raise Internal("the server sent an event that this client does not know", reason="UNKNOWN_EVENT")


def from_tokenize_response(message: generation_pb2.TokenizeResponse) -> Tokenization:
    return Tokenization(tuple(message.token_ids), tuple(message.tokens), message.max_model_len)


def from_pin_response(message: prefix_pb2.PinPrefixResponse) -> PinnedPrefix:
    return PinnedPrefix(message.pin_id, message.pinned_tokens, message.pinned_blocks, message.time_to_live_ms)


def from_model(message: model_pb2.Model) -> Model:
    return Model(
        name=message.name,
        architecture=message.architecture,
        dtype=message.dtype,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        eos_token_ids=tuple(message.eos_token_ids),
        has_chat_template=message.has_chat_template,
    )


def from_models(message: model_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(from_model(model) for model in message.models)


def from_server_info(message: model_pb2.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        gateway_id=message.gateway_id,
        replicas=tuple(_replica(replica) for replica in message.replicas),
        limits=_limits(message.limits),
    )


def _sequence(message: generation_pb2.GeneratedSequence) -> GeneratedSequence:
    return GeneratedSequence(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_positions(message.logprobs),
        finish_reason=_finish_reason(message.finish_reason),
        stop_string=optional(message, "stop_string"),
        stop_token_id=optional(message, "stop_token_id"),
        cumulative_logprob=optional(message, "cumulative_logprob"),
    )


def _chunk(message: generation_pb2.TokenChunk) -> TokenChunk:
    return TokenChunk(
        sequence_index=message.sequence_index,
        offset=message.offset,
        token_ids=tuple(message.token_ids),
        text=message.text,
        logprobs=_positions(message.logprobs),
    )


def _finished(message: generation_pb2.SequenceFinished) -> SequenceFinished:
    return SequenceFinished(
        sequence_index=message.sequence_index,
        num_tokens=message.num_tokens,
        finish_reason=_finish_reason(message.finish_reason),
        stop_string=optional(message, "stop_string"),
        stop_token_id=optional(message, "stop_token_id"),
        cumulative_logprob=optional(message, "cumulative_logprob"),
    )


def _completed(message: generation_pb2.RequestCompleted) -> RequestCompleted:
    return RequestCompleted(
        request_id=message.request_id,
        model=message.model,
        usage=_usage(message.usage),
        prompt_logprobs=_positions(message.prompt_logprobs),
    )


def _usage(message: common_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        cached_tokens=message.cached_tokens,
        generated_tokens=message.generated_tokens,
        queue_ms=message.queue_ms,
        prefill_ms=message.prefill_ms,
        decode_ms=message.decode_ms,
        preemptions=message.preemptions,
    )


def _positions(messages: Iterable[common_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(PositionLogprobs(_logprob(m.chosen), tuple(_logprob(entry) for entry in m.top)) for m in messages)


def _logprob(message: common_pb2.Logprob) -> Logprob:
    return Logprob(message.token_id, message.logprob, message.rank)


def _replica(message: model_pb2.Replica) -> Replica:
    return Replica(
        scheduler_address=message.scheduler_address,
        connected=message.connected,
        scheduler_epoch=message.scheduler_epoch,
        block_size=message.block_size,
        num_gpu_blocks=message.num_gpu_blocks,
        num_host_blocks=message.num_host_blocks,
        max_num_seqs=message.max_num_seqs,
        max_num_batched_tokens=message.max_num_batched_tokens,
    )


def _limits(message: model_pb2.Limits) -> Limits:
    return Limits(
        max_message_bytes=message.max_message_bytes,
        max_prompt_tokens=message.max_prompt_tokens,
        max_n=message.max_n,
        max_logprobs=message.max_logprobs,
        max_stop_strings=message.max_stop_strings,
        max_stop_string_bytes=message.max_stop_string_bytes,
        max_chat_messages=message.max_chat_messages,
        max_logit_bias=message.max_logit_bias,
        max_stop_token_ids=message.max_stop_token_ids,
    )


def _finish_reason(value: common_pb2.FinishReason) -> FinishReason:
    return _FINISH_REASONS.get(value, FinishReason.UNSPECIFIED)


def optional(message: Any, field: str) -> Any:
    """The value of an `optional` field, or None where it is absent."""
    return getattr(message, field) if message.HasField(field) else None
