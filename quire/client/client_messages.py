"""Converts the client's values to messages of quire.gateway.v1 and back."""

# Callers may not be type-checked: values of wrong types are refused by name.
# pyright: reportUnnecessaryIsInstance=false

import dataclasses
import json
import sys
from array import array
from collections.abc import Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from quire.client.types import (
    Adapter,
    AnyChatMessage,
    BeamSearch,
    ChatFields,
    ChatMessage,
    Constraint,
    EarlyStopping,
    Embeddings,
    FinishReason,
    GeneratedSequence,
    Generation,
    GenerationOptions,
    Limits,
    Logprob,
    Model,
    PinnedPrefix,
    PositionLogprobs,
    RankedDocument,
    Ranking,
    Replica,
    ReplicaRole,
    RequestCompleted,
    Scores,
    SequenceFinished,
    ServerInfo,
    StreamEvent,
    StructuralTag,
    StructuralTags,
    Texts,
    TokenChunk,
    Tokenization,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from quire.common.v1 import common_pb2
from quire.gateway.v1 import embedding_pb2, generation_pb2, model_pb2, prefix_pb2
from quire.model_files.progress import LoadProgress
from quire.rpc.errors import Internal, invalid_field

T = TypeVar("T")
AnyMessage = TypeVar("AnyMessage", bound=Message)
GenerateMessage = TypeVar("GenerateMessage", generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)
ChatMessageT = TypeVar("ChatMessageT", generation_pb2.ChatRequest, generation_pb2.ChatStreamRequest)


_FINISH_REASONS = {common_pb2.FinishReason.Value(f"FINISH_REASON_{each.name}"): each for each in FinishReason}
_EARLY_STOPPING = {each: common_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{each.name}") for each in EarlyStopping}
_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_KINDS = {
    FieldDescriptor.CPPTYPE_STRING: "a str that UTF-8 can encode",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
}
_TOOL_CHOICES = {
    name: generation_pb2.ToolChoiceMode.Value(f"TOOL_CHOICE_MODE_{name.upper()}")
    for name in ("auto", "none", "required")
}
# Options that are messages themselves.
_OPTIONS_WITH_FIELDS = ("beam_search", "constraint")
_OPTIONS = [each.name for each in dataclasses.fields(GenerationOptions) if each.name not in _OPTIONS_WITH_FIELDS]


def to_generate_request(
    message: GenerateMessage,
    prompt: str | Sequence[int],
    options: GenerationOptions | None,
    *,
    model: str | None = None,
    request_id: str | None = None,
    priority: int | None = None,
) -> GenerateMessage:
    """Fills `message`, a new request of either kind, and returns it.

    Raises:
        InvalidArgument: a value does not fit its field, for example a negative token id.
        TypeError: the prompt is neither text nor token ids, or the options are no GenerationOptions.
    """
    if isinstance(prompt, str):
        _fill(message, text=prompt)
    else:
        _check_is_sequence("prompt", prompt, "a str or a sequence of token ids")
        message.token_ids.SetInParent()
        _fill(message.token_ids, ids=prompt)
    _fill(message, model=model, request_id=request_id, priority=priority)
    _fill_options(message, options)
    return message


def to_chat_request(
    message: ChatMessageT,
    messages: Sequence[AnyChatMessage],
    options: GenerationOptions | None,
    chat: ChatFields,
) -> ChatMessageT:
    """Fills `message`, a new request of either kind, and returns it.

    Raises:
        InvalidArgument: a value does not fit its field.
        TypeError: the messages are no messages, the options no GenerationOptions, or `chat` has an unknown field.
    """
    _check_is_sequence("messages", messages, "a sequence of ChatMessage")
    _add_messages(message, "messages", messages)
    _fill_chat(message, chat)
    _fill_options(message, options)
    return message


def to_tokenize_request(
    text_or_messages: str | Sequence[AnyChatMessage], *, add_special_tokens: bool | None, model: str | None
) -> generation_pb2.TokenizeRequest:
    request = generation_pb2.TokenizeRequest()
    if isinstance(text_or_messages, str):
        _fill(request, text=text_or_messages)
    else:
        _check_is_sequence("text_or_messages", text_or_messages, "a str or a sequence of ChatMessage")
        request.chat.SetInParent()
        _add_messages(request.chat, "text_or_messages", text_or_messages)
    _fill(request, model=model, add_special_tokens=add_special_tokens)
    return request


def to_detokenize_request(
    token_ids: Sequence[int], *, include_special_tokens: bool | None, model: str | None
) -> generation_pb2.DetokenizeRequest:
    request = generation_pb2.DetokenizeRequest()
    _put(request, "token_ids", token_ids)
    _fill(request, include_special_tokens=include_special_tokens, model=model)
    return request


def to_pin_request(
    prefix: str | Sequence[int] | Sequence[AnyChatMessage], *, time_to_live_ms: int | None, model: str | None
) -> prefix_pb2.PinPrefixRequest:
    """Raises as `to_generate_request`."""
    request = prefix_pb2.PinPrefixRequest()
    if isinstance(prefix, str):
        _fill(request, text=prefix)
    else:
        _check_is_sequence("prefix", prefix, "a str, a sequence of token ids or a sequence of ChatMessage")
        entries: list[Any] = list(prefix)
        if entries and all(isinstance(entry, ChatMessage | Mapping) for entry in entries):
            _add_messages(request.chat, "prefix", entries)
        else:
            request.token_ids.SetInParent()
            _fill(request.token_ids, ids=entries)
    _fill(request, time_to_live_ms=time_to_live_ms, model=model)
    return request


def to_embed_request(texts: Texts, **fields: Any) -> embedding_pb2.EmbedRequest:
    """Raises as `to_generate_request`."""
    request = embedding_pb2.EmbedRequest()
    if not isinstance(texts, str):
        _check_is_sequence("texts", texts, "a str, a sequence of str or a sequence of sequences of token ids")
    if isinstance(texts, str) or not texts or isinstance(texts[0], str):
        _fill(request, texts=texts)
    else:
        for position, token_ids in enumerate(texts):
            _put(request.token_ids.add(), "ids", token_ids, f"texts[{position}]")
    return given(request, **fields)


def to_embed_stream_request(texts: Texts, **fields: Any) -> embedding_pb2.EmbedStreamRequest:
    """Raises as `to_generate_request`."""
    return embedding_pb2.EmbedStreamRequest(batch=to_embed_request(texts, **fields))


def given(message: AnyMessage, **values: Any) -> AnyMessage:
    """As `filled`, with the values that are not None."""
    _fill(message, **values)
    return message


def filled(message: AnyMessage, **values: Any) -> AnyMessage:
    """`message`, a new request, with these fields. Raises InvalidArgument if a value does not fit its field."""
    for name, value in values.items():
        _put(message, name, value)
    return message


def _check_is_sequence(name: str, value: object, limit: str) -> None:
    """TypeError where a value is a single one."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r:.80}; it must be {limit}")


def _add_messages(message: Any, name: str, messages: Iterable[AnyChatMessage]) -> None:
    """`name` is the caller's name of the messages."""
    for index, entry in enumerate(messages):
        path = f"{name}[{index}]"
        given = _chat_message(path, entry)
        added = message.messages.add()
        for field in ("role", "content", "name", "tool_call_id", "reasoning"):
            if (value := getattr(given, field)) is not None or field == "content":
                _put(added, field, value, f"{path}.{field}")
        _check_is_sequence(f"{path}.tool_calls", given.tool_calls, "a sequence of ToolCall")
        for number, call in enumerate(given.tool_calls):
            where = f"{path}.tool_calls[{number}]"
            if not isinstance(call, ToolCall):
                raise TypeError(f"{where} is {call!r:.80}; it must be a ToolCall")
            made = added.tool_calls.add()
            for field in ("id", "name", "arguments"):
                _put(made, field, getattr(call, field), f"{where}.{field}")


def _chat_message(path: str, entry: AnyChatMessage) -> ChatMessage:
    if isinstance(entry, ChatMessage):
        return entry
    if isinstance(entry, Mapping) and {"role", "content"} <= set(entry) <= _MESSAGE_FIELDS:
        return ChatMessage(**entry)
    limit = 'a ChatMessage, or a mapping of its fields with "role" and "content"'
    raise TypeError(f"{path} is {entry!r:.80}; it must be {limit}")


_MESSAGE_FIELDS = {each.name for each in dataclasses.fields(ChatMessage)}


def _fill_chat(message: Any, chat: ChatFields) -> None:
    """Sets the fields of a chat other than messages and options; raises as `to_chat_request`."""
    if unknown := chat.keys() - ChatFields.__annotations__.keys():
        raise TypeError(f"a chat has no {', '.join(sorted(unknown))}")
    tools = chat.get("tools", ())
    _check_is_sequence("tools", tools, "a sequence of Tool")
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        if not isinstance(tool, Tool):
            raise TypeError(f"{path} is {tool!r:.80}; it must be a Tool")
        added = message.tools.add()
        parameters = _schema_text(tool.parameters)
        _fill(added, path, name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)
    if (choice := chat.get("tool_choice")) is not None:
        if choice in _TOOL_CHOICES:
            message.tool_choice.mode = _TOOL_CHOICES[choice]
        else:
            _put(message.tool_choice, "name", choice, "tool_choice")
    if (allowed := chat.get("allowed_tools")) is not None:
        _check_is_sequence("allowed_tools", allowed, "a sequence of names of tools")
        _put(message.tool_choice, "allowed", allowed, "allowed_tools")
    names = ("model", "request_id", "priority", "parallel_tool_calls")
    _fill(message, **{name: chat.get(name) for name in names})
    if (wanted := chat.get("response_format")) is not None:
        constraint = wanted if isinstance(wanted, Constraint) else Constraint(json_schema=wanted)
        fill_constraint(message.response_format, constraint, "response_format")
    if (arguments := chat.get("template_arguments")) is not None:
        try:
            text = json.dumps(dict(arguments), ensure_ascii=False, allow_nan=False)
            message.template_options.arguments_json = text
        except (ValueError, TypeError, RecursionError) as error:
            limit = "a mapping of names to values of JSON"
            raise invalid_field("template_arguments", f"is {arguments!r:.80}; it must be {limit}") from error
    names = ("add_generation_prompt", "continue_final_message")
    _fill(message.template_options, **{name: chat.get(name) for name in names})


def _fill_options(message: Any, options: GenerationOptions | None) -> None:
    if options is None:
        return
    if not isinstance(options, GenerationOptions):
        raise TypeError(f"options is {options!r:.80}; it must be a GenerationOptions")
    for group in (message.sampling, message.stopping, message.output):
        names = [name for name in _OPTIONS if name in group.DESCRIPTOR.fields_by_name]
        _fill(group, **{name: getattr(options, name) for name in names})
    if options.beam_search is not None:
        _fill_beam_search(message.sampling.beam_search, options.beam_search)
    if options.constraint is not None:
        fill_constraint(message.sampling.constraint, options.constraint)


def fill_constraint(message: common_pb2.Constraint, constraint: Constraint, path: str = "constraint") -> None:
    """Sets a constraint in a message; `path` is the caller's name of it.

    Raises:
        InvalidArgument: it does not say exactly one thing, or a value does not fit its field.
    """
    if not isinstance(constraint, Constraint):
        raise invalid_field(path, f"is {constraint!r:.80}; it must be a Constraint")
    _check_one(path, constraint, ("json_schema", "json_object", "regex", "choice", "lark", "structural_tags"))
    _fill_content(message, path, constraint)
    if constraint.json_object:
        message.json_object.SetInParent()
    if constraint.choice:
        _put(message.choice, "texts", constraint.choice, f"{path}.choice")
    _fill(message, path, begins_after=constraint.begins_after, no_white_space=constraint.no_white_space)
    if (tags := constraint.structural_tags) is not None:
        if not isinstance(tags, StructuralTags):
            raise invalid_field(f"{path}.structural_tags", f"is {tags!r:.80}; it must be a StructuralTags")
        _fill(message.structural_tags, required=tags.required, single=tags.single, no_free_text=tags.no_free_text)
        _check_is_sequence("structural_tags.tags", tags.tags, "a sequence of StructuralTag")
        for index, tag in enumerate(tags.tags):
            where = f"{path}.structural_tags.tags[{index}]"
            if not isinstance(tag, StructuralTag):
                raise invalid_field(where, f"is {tag!r:.80}; it must be a StructuralTag")
            _check_one(where, tag, ("json_schema", "regex", "lark"))
            added = message.structural_tags.tags.add()
            _put(added, "begin", tag.begin, f"{where}.begin")
            _put(added, "end", tag.end, f"{where}.end")
            _fill_content(added, where, tag)


def _check_one(path: str, value: object, names: Sequence[str]) -> None:
    given = [name for name in names if getattr(value, name) not in (None, False, ())]
    if len(given) != 1:
        said = f"sets {' and '.join(given)}" if given else "sets nothing"
        raise invalid_field(path, f"{said}; it must set exactly one of {', '.join(names)}")


def _fill_content(message: Message, path: str, content: Constraint | StructuralTag) -> None:
    _fill(message, path, json_schema=_schema_text(content.json_schema), regex=content.regex, lark=content.lark)


def _schema_text(schema: Any) -> Any:
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return json.dumps(schema, ensure_ascii=False) if isinstance(schema, Mapping) else schema


def _fill_beam_search(message: common_pb2.BeamSearchParameters, beam: BeamSearch) -> None:
    if not isinstance(beam, BeamSearch):
        raise invalid_field("beam_search", f"is {beam!r:.80}; it must be a BeamSearch")
    early_stopping: int | None = None
    if (value := beam.early_stopping) is not None:
        try:
            early_stopping = _EARLY_STOPPING[EarlyStopping(value)]
        except ValueError as error:
            limit = f"one of EarlyStopping: {', '.join(EarlyStopping)}"
            raise invalid_field("early_stopping", f"is {value!r:.80}; it must be {limit}") from error
    _fill(message, beam_width=beam.beam_width, length_penalty=beam.length_penalty, early_stopping=early_stopping)


def from_generate_response(
    message: generation_pb2.GenerateResponse | generation_pb2.ChatResponse,
) -> Generation:
    return _read(
        Generation,
        message,
        sequences=tuple(map(_sequence, message.sequences)),
        usage=_read(Usage, message.usage),
        prompt_logprobs=_positions(message.prompt_logprobs),
    )


def with_parsed(answer: Generation, chat: ChatFields) -> Generation:
    """The answer, with the parsed values of its sequences if the `response_format` of the chat is a schema."""
    wanted = chat.get("response_format")
    if wanted is None or isinstance(wanted, Constraint):
        return answer
    sequences = tuple(
        dataclasses.replace(each, parsed=_parsed(each.text, wanted))
        if each.finish_reason is FinishReason.STOP
        else each
        for each in answer.sequences
    )
    return dataclasses.replace(answer, sequences=sequences)


def _parsed(text: str, schema: Any) -> Any:
    """The value of a text in JSON; None if it is not valid, as after a stop string."""
    validate = getattr(schema, "model_validate_json", json.loads)
    try:
        return validate(text)
    except ValueError:
        return None


def from_stream_response(
    message: generation_pb2.GenerateStreamResponse | generation_pb2.ChatStreamResponse,
) -> StreamEvent:
    """Internal when the message holds no event that this client knows."""
    match message.WhichOneof("event"):
        case "chunk":
            # One a token: written out, which is faster than `_read`.
            chunk = message.chunk
            return TokenChunk(
                sequence_index=chunk.sequence_index,
                offset=chunk.offset,
                token_ids=tuple(chunk.token_ids),
                text=chunk.text,
                logprobs=_positions(chunk.logprobs),
                reasoning=chunk.reasoning,
                tool_calls=tuple(_read(ToolCallDelta, call) for call in chunk.tool_calls),
            )
        case "finished":
            return _read(SequenceFinished, message.finished, finish_reason=_finish_reason(message.finished))
        case "completed":
            return _read(
                RequestCompleted,
                message.completed,
                usage=_read(Usage, message.completed.usage),
                prompt_logprobs=_positions(message.completed.prompt_logprobs),
            )
        case _:
            raise Internal("the server sent an event that this client does not know", reason="UNKNOWN_EVENT")


def from_tokenize_response(message: generation_pb2.TokenizeResponse) -> Tokenization:
    return _read(Tokenization, message)


def from_detokenize_response(message: generation_pb2.DetokenizeResponse) -> str:
    return message.text


def from_embed_response(message: embedding_pb2.EmbedResponse | embedding_pb2.EmbedStreamResponse) -> Embeddings:
    return _read(Embeddings, message, vectors=tuple(map(_vector, message.embeddings)))


def from_rerank_response(message: embedding_pb2.RerankResponse) -> Ranking:
    return _read(Ranking, message, results=tuple(_read(RankedDocument, each) for each in message.results))


def from_score_response(message: embedding_pb2.ScoreResponse) -> Scores:
    return _read(Scores, message)


def _vector(message: embedding_pb2.Embedding) -> "array[float]":
    """The numbers by their bytes, a tenth of the time of reading each number."""
    vector, size = array("f"), 4 * len(message.values)
    vector.frombytes(message.SerializeToString()[-size:] if size else b"")
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def from_pin_response(message: prefix_pb2.PinPrefixResponse) -> PinnedPrefix:
    return _read(PinnedPrefix, message)


def from_get_model_response(message: model_pb2.GetModelResponse) -> Model:
    return _read(Model, message.model)


def from_models(message: model_pb2.ListModelsResponse) -> tuple[Model, ...]:
    return tuple(_read(Model, each) for each in message.models)


def from_load_adapter_response(message: model_pb2.LoadAdapterResponse) -> Adapter:
    return _read(Adapter, message.adapter)


def from_adapters(message: model_pb2.ListAdaptersResponse) -> tuple[Adapter, ...]:
    return tuple(_read(Adapter, each) for each in message.adapters)


def from_server_info(message: model_pb2.GetServerInfoResponse) -> ServerInfo:
    replicas = tuple(map(_replica, message.replicas))
    return _read(ServerInfo, message, replicas=replicas, limits=_read(Limits, message.limits))


def from_nothing(_: Message) -> None:
    """Reads an answer without fields."""


def _read(cls: type[T], message: Any, **given: Any) -> T:
    """A dataclass with the fields of a message: tuples for lists, None for absent ones; `given` has the fields whose
    types differ."""
    for name in (each.name for each in dataclasses.fields(cast(Any, cls)) if each.name not in given):
        field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
        is_absent = field.has_presence and not message.HasField(name)
        given[name] = tuple(value) if field.is_repeated else None if is_absent else value
    return cls(**given)


def _replica(message: model_pb2.Replica) -> Replica:
    loading = LoadProgress.of(message.loading) if message.HasField("loading") else None
    return _read(Replica, message, loading=loading, role=ReplicaRole.of(message.role))


def _sequence(message: generation_pb2.GeneratedSequence) -> GeneratedSequence:
    return _read(
        GeneratedSequence,
        message,
        finish_reason=_finish_reason(message),
        logprobs=_positions(message.logprobs),
        tool_calls=tuple(_read(ToolCall, call) for call in message.tool_calls),
        parsed=None,
    )


def _finish_reason(message: generation_pb2.GeneratedSequence | generation_pb2.SequenceFinished) -> FinishReason:
    return _FINISH_REASONS.get(message.finish_reason, FinishReason.UNSPECIFIED)


def _positions(messages: Iterable[common_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(PositionLogprobs(_logprob(m.chosen), tuple(_logprob(entry) for entry in m.top)) for m in messages)


def _logprob(message: common_pb2.Logprob) -> Logprob:
    return Logprob(message.token_id, message.logprob, message.rank)


def _fill(message: Message, path: str = "", /, **values: Any) -> None:
    """Sets the fields that are not None; raises as `_put`. `path` is the caller's name of the message."""
    for name, value in values.items():
        if value is not None:
            _put(message, name, value, f"{path}.{name}" if path else None)


def _put(message: Message, name: str, value: Any, path: str | None = None) -> None:
    """Sets a field; one str is a sequence of one.

    Args:
        path: The caller's name of the field; the field's own when absent.

    Raises:
        InvalidArgument: the value does not fit the field.
    """
    try:
        _set(message, name, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise invalid_field(path or name, f"is {value!r:.80}; it must be {_limit(message, name)}") from error


def _set(message: Message, name: str, value: Any) -> None:
    """ValueError, TypeError or OverflowError where the value does not fit."""
    held: Any = getattr(message, name)
    kind = cast(type[object], type(held))
    is_map = issubclass(kind, MutableMapping)
    if is_map != isinstance(value, Mapping):
        raise TypeError("only a mapping fits a map")
    if is_map:
        held.update(value)
    elif issubclass(kind, MutableSequence):
        held.extend([value] if isinstance(value, str | bytes) else value)
    else:
        setattr(message, name, value)


def _limit(message: Message, name: str) -> str:
    """A description of the type of a field."""
    field: Any = message.DESCRIPTOR.fields_by_name[name]
    held = getattr(message, name)
    if isinstance(held, MutableMapping):
        key, value = (_kind(field.message_type.fields_by_name[part]) for part in ("key", "value"))
        return f"a mapping, each key {key} and each value {value}"
    if isinstance(held, MutableSequence):
        one = "a str or " if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else ""
        return f"{one}a sequence, each entry {_kind(field)}"
    return _kind(field)


def _kind(field: Any) -> str:
    if field.cpp_type not in _INTEGERS:
        return _KINDS[field.cpp_type]
    low, high = _INTEGERS[field.cpp_type]
    return f"a whole number in [{low:,}, {high:,}]"
