"""Messages of quire.gateway.v1 to values of the gateway, and back.

GenerateRequest and GenerateStreamRequest, ChatRequest and ChatStreamRequest have fields of the same names and meaning;
so have their responses. They are converted by the same functions.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from gateway.replicas.events import (
    Chunk,
    Completed,
    Event,
    Finished,
    FinishReason,
    GeneratedSequence,
    PositionLogprobs,
    Usage,
    Welcome,
)
from gateway.request.durable import ClientOffset
from gateway.request.limits import MAX_LOGIT_BIAS, MAX_N, Limits
from gateway.request.prompts import TokenizedText
from gateway.request.types import (
    ChatMessage,
    ChatPrompt,
    HeldSequence,
    Prompt,
    RequestOptions,
    TextPrompt,
    TokenPrompt,
)
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.rpc.errors import invalid_field

GenerateMessage = generation_pb2.GenerateRequest | generation_pb2.GenerateStreamRequest
ChatRequestMessage = generation_pb2.ChatRequest | generation_pb2.ChatStreamRequest
Response = TypeVar("Response", generation_pb2.GenerateResponse, generation_pb2.ChatResponse)
StreamResponse = TypeVar(
    "StreamResponse",
    generation_pb2.GenerateStreamResponse,
    generation_pb2.ChatStreamResponse,
    generation_pb2.ResumeStreamResponse,
)

FEW_TOKENS = 4096
"""Tokens that are put into a message in less than a millisecond."""

_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}


def options_of_generate(message: GenerateMessage) -> RequestOptions:
    """What the caller asked for, as it came: `validation` checks it. The prompt is None where there is none.

    Lists are the message's own: they may have millions of entries, and most of those are refused for their number.
    """
    prompt: Prompt | None = None
    match message.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(message.text)
        case "token_ids":
            prompt = TokenPrompt(message.token_ids.ids)
    return _options(message, prompt)


def options_of_chat(message: ChatRequestMessage) -> RequestOptions:
    """Likewise of a chat."""
    return _options(message, ChatPrompt(_ChatMessages(message.messages)))


def client_offsets(message: generation_pb2.ResumeStreamRequest) -> list[ClientOffset]:
    """How much of each sequence the caller already has."""
    return [
        ClientOffset(each.sequence_index, each.offset, optional(each, "num_characters")) for each in message.offsets
    ]


class _ChatMessages(Sequence[ChatMessage]):
    """The messages of a conversation, each converted when it is read: too many are refused for their number alone."""

    def __init__(self, messages: Sequence[generation_pb2.ChatMessage]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, position: Any) -> Any:
        message = self._messages[position]
        return ChatMessage(message.role, message.content)


def tokenize_input(message: generation_pb2.TokenizeRequest) -> TextPrompt | ChatPrompt | None:
    """None where neither a text nor a chat is given."""
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return ChatPrompt(_ChatMessages(message.chat.messages))
    return None


def prefix_of(message: prefix_pb2.PinPrefixRequest) -> Prompt | None:
    """None where no prefix is given."""
    match message.WhichOneof("prefix"):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(message.token_ids.ids)
        case "chat":
            return ChatPrompt(_ChatMessages(message.chat.messages))
    return None


def tokenized_response(tokenized: TokenizedText) -> generation_pb2.TokenizeResponse:
    """The answer to Tokenize. It is made in pieces: other threads run between them."""
    response = generation_pb2.TokenizeResponse(max_model_len=tokenized.max_model_len)
    for begin in range(0, len(tokenized.token_ids), FEW_TOKENS):
        response.token_ids.extend(tokenized.token_ids[begin : begin + FEW_TOKENS])
        response.tokens.extend(tokenized.tokens[begin : begin + FEW_TOKENS])
    return response


def generated_response(
    kind: type[Response],
    request_id: str,
    model: str,
    sequences: Sequence[GeneratedSequence],
    usage: Usage,
    prompt_logprobs: Collection[PositionLogprobs],
) -> Response:
    """The whole answer to a request that is over, as a response of the called method."""
    return kind(
        request_id=request_id,
        model=model,
        sequences=[_generated_sequence(sequence) for sequence in sequences],
        usage=_usage_message(usage),
        prompt_logprobs=[_logprobs_message(position) for position in prompt_logprobs],
    )


def stream_response(kind: type[StreamResponse], request_id: str, model: str, event: Event) -> StreamResponse:
    """One event of a stream, as a response of the called method."""
    match event:
        case Chunk():
            return kind(
                chunk=generation_pb2.TokenChunk(
                    sequence_index=event.sequence_index,
                    offset=event.offset,
                    token_ids=event.token_ids,
                    text=event.text,
                    logprobs=[_logprobs_message(position) for position in event.logprobs],
                )
            )
        case Finished():
            return kind(
                finished=generation_pb2.SequenceFinished(
                    sequence_index=event.sequence_index,
                    num_tokens=event.num_tokens,
                    finish_reason=_REASONS[event.reason],
                    stop_string=event.stop_string,
                    stop_token_id=event.stop_token_id,
                    cumulative_logprob=event.cumulative_logprob,
                )
            )
        case Completed():
            return kind(
                completed=generation_pb2.RequestCompleted(
                    request_id=request_id,
                    model=model,
                    usage=_usage_message(event.usage),
                    prompt_logprobs=[_logprobs_message(position) for position in event.prompt_logprobs],
                )
            )


def optional(message: Any, field: str) -> Any:
    """The value of an `optional` field; None where it is absent."""
    return getattr(message, field) if message.HasField(field) else None


def limits_message(limits: Limits) -> model_pb2.Limits:
    """The limits of requests, as clients see them."""
    return model_pb2.Limits(
        max_message_bytes=limits.max_message_bytes,
        max_prompt_tokens=limits.max_prompt_tokens,
        max_n=limits.max_n,
        max_logprobs=limits.max_logprobs,
        max_stop_strings=limits.max_stop_strings,
        max_stop_string_bytes=limits.max_stop_string_bytes,
        max_chat_messages=limits.max_chat_messages,
        max_logit_bias=MAX_LOGIT_BIAS,
        max_stop_token_ids=limits.max_stop_token_ids,
    )


def replica_message(address: str, connected: bool, welcome: Welcome | None) -> model_pb2.Replica:
    """A replica that was never reached has its address and nothing else."""
    if welcome is None:
        return model_pb2.Replica(scheduler_address=address, connected=connected)
    return model_pb2.Replica(
        scheduler_address=address,
        connected=connected,
        scheduler_epoch=welcome.scheduler_epoch,
        block_size=welcome.block_size,
        num_gpu_blocks=welcome.num_gpu_blocks,
        num_host_blocks=welcome.num_host_blocks,
        max_num_seqs=welcome.max_num_seqs,
        max_num_batched_tokens=welcome.max_num_batched_tokens,
    )


def _options(message: GenerateMessage | ChatRequestMessage, prompt: Prompt | None) -> RequestOptions:
    durable = isinstance(message, generation_pb2.GenerateStreamRequest | generation_pb2.ChatStreamRequest)
    return RequestOptions(
        prompt=prompt,
        model=optional(message, "model"),
        sampling=message.sampling,
        stopping=message.stopping,
        output=message.output,
        request_id=optional(message, "request_id"),
        priority=optional(message, "priority"),
        durable=durable and message.durable,
        continue_from=_held_sequences(message.continue_from),
    )


def _held_sequences(messages: Sequence[generation_pb2.HeldSequence]) -> tuple[HeldSequence, ...]:
    """Raises InvalidArgument where there are more than any request has, before they are converted."""
    if len(messages) > MAX_N:
        raise invalid_field("continue_from", f"has {len(messages):,} entries; the most is {MAX_N}")
    return tuple(
        HeldSequence(each.token_ids, optional(each, "num_characters"), optional(each, "cumulative_logprob"))
        for each in messages
    )


def _generated_sequence(sequence: GeneratedSequence) -> generation_pb2.GeneratedSequence:
    finished = sequence.finished
    return generation_pb2.GeneratedSequence(
        index=finished.sequence_index,
        text=sequence.text,
        token_ids=sequence.token_ids,
        logprobs=[_logprobs_message(position) for position in sequence.logprobs],
        finish_reason=_REASONS[finished.reason],
        stop_string=finished.stop_string,
        stop_token_id=finished.stop_token_id,
        cumulative_logprob=finished.cumulative_logprob,
    )


def _logprobs_message(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.Logprob(**position.chosen._asdict()),
        top=[common_pb2.Logprob(**entry._asdict()) for entry in position.top],
    )


def _usage_message(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.generated_tokens,
        queue_ms=usage.queue_ms,
        prefill_ms=usage.prefill_ms,
        decode_ms=usage.decode_ms,
        preemptions=usage.preemptions,
    )
