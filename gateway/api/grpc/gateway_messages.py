"""Conversion of messages of quire.gateway.v1 to values of the gateway, and back.

GenerateRequest and GenerateStreamRequest have the same fields, and so have ChatRequest and ChatStreamRequest, and the
responses. The same functions convert both.
"""

import dataclasses
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
from gateway.request.text_service import TokenizedText
from gateway.types import (
    ChatMessage,
    ChatPrompt,
    HeldSequence,
    Prompt,
    RequestOptions,
    TextPrompt,
    TokenPrompt,
    optional,
)
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, model_pb2
from quire.model_files.progress import LoadProgress
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
"""Number of tokens that are added to a message in less than a millisecond."""


def options_of_generate(message: GenerateMessage) -> RequestOptions:
    """The caller's request, before validation. It refers to the message's lists without a copy: they may have millions
    of entries, and are then rejected."""
    return _options(message, prompt_of(message, "prompt"))


def options_of_chat(message: ChatRequestMessage) -> RequestOptions:
    """The caller's chat request, before validation."""
    prompt = ChatPrompt(
        _ChatMessages(message.messages),
        tools=message.tools,
        tool_choice=optional(message, "tool_choice"),
        parallel_tool_calls=message.parallel_tool_calls or not message.HasField("parallel_tool_calls"),
        response_format=optional(message, "response_format"),
        template_options=optional(message, "template_options"),
    )
    return _options(message, prompt)


def client_offsets(message: generation_pb2.ResumeStreamRequest) -> list[ClientOffset]:
    """The part of each sequence that the caller already has."""
    return [
        ClientOffset(each.sequence_index, each.offset, optional(each, "num_characters")) for each in message.offsets
    ]


class _ChatMessages(Sequence[ChatMessage]):
    """The messages of a conversation, converted when they are read: too many are rejected without a conversion."""

    def __init__(self, messages: Sequence[generation_pb2.ChatMessage]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    def __getitem__(self, position: Any) -> Any:
        message = self._messages[position]
        return ChatMessage(
            message.role,
            message.content,
            optional(message, "name"),
            message.tool_calls,
            optional(message, "tool_call_id"),
            optional(message, "reasoning"),
        )


def prompt_of(message: Any, oneof: str) -> Any:
    """The text, token ids or chat that is set in a `oneof`; None if none is set."""
    match message.WhichOneof(oneof):
        case "text":
            return TextPrompt(message.text)
        case "token_ids":
            return TokenPrompt(message.token_ids.ids)
        case "chat":
            chat = message.chat
            options = optional(chat, "template_options")
            return ChatPrompt(_ChatMessages(chat.messages), tools=chat.tools, template_options=options)
    return None


def tokenized_response(tokenized: TokenizedText) -> generation_pb2.TokenizeResponse:
    """The answer to Tokenize. It is made in pieces, so that other threads run in between."""
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
    """The whole answer to a finished request, as a response of the called method."""
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
            # Filled in place: a message that is passed to the constructor of another is copied.
            response = kind()
            chunk = response.chunk
            chunk.sequence_index, chunk.offset = event.sequence_index, event.offset
            chunk.token_ids.extend(event.token_ids)
            chunk.text, chunk.reasoning = event.text, event.reasoning
            if event.logprobs:
                chunk.logprobs.extend(map(_logprobs_message, event.logprobs))
            for call in event.tool_calls:
                chunk.tool_calls.add(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            return response
        case Finished():
            return kind(
                finished=generation_pb2.SequenceFinished(
                    sequence_index=event.sequence_index,
                    num_tokens=event.num_tokens,
                    finish_reason=_reason(event.reason),
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


_NOT_OF_WELCOME = {"scheduler_address", "model", "connected", "loading", "role"}


def limits_message(limits: Limits) -> model_pb2.Limits:
    """The limits of requests, as a message for clients."""
    names = {each.name for each in model_pb2.Limits.DESCRIPTOR.fields} - {"max_logit_bias"}
    return model_pb2.Limits(max_logit_bias=MAX_LOGIT_BIAS, **{name: getattr(limits, name) for name in names})


def replica_message(
    address: str, model: str, connected: bool, welcome: Welcome | None, loading: LoadProgress | None
) -> model_pb2.Replica:
    """The description of a replica; `welcome` is None if it was never reached."""
    replica = model_pb2.Replica(
        scheduler_address=address,
        model=model,
        connected=connected,
        loading=None if loading is None else loading.message(),
    )
    if welcome is not None:
        names = {each.name for each in model_pb2.Replica.DESCRIPTOR.fields} - _NOT_OF_WELCOME
        values = {name: getattr(welcome, name) for name in names}
        replica.MergeFrom(model_pb2.Replica(role=welcome.role.message, **values))
    return replica


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
    """The sequences that the caller has. Raises InvalidArgument if there are too many, before any is converted."""
    if len(messages) > MAX_N:
        raise invalid_field("continue_from", f"has {len(messages):,} entries; the max is {MAX_N}")
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
        finish_reason=_reason(finished.reason),
        stop_string=finished.stop_string,
        stop_token_id=finished.stop_token_id,
        cumulative_logprob=finished.cumulative_logprob,
        reasoning=sequence.reasoning,
        tool_calls=sequence.tool_calls,
    )


def _logprobs_message(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=common_pb2.Logprob(**position.chosen._asdict()),
        top=[common_pb2.Logprob(**entry._asdict()) for entry in position.top],
    )


def _usage_message(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(**dataclasses.asdict(usage))


def _reason(reason: FinishReason) -> common_pb2.FinishReason:
    return getattr(common_pb2, f"FINISH_REASON_{reason.name}")
