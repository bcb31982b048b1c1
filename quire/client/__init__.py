"""The Python client of a Quire gateway.

    from quire.client import ChatMessage, Client, GenerationOptions

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", GenerationOptions(max_tokens=40)).text)
        with client.chat_stream([ChatMessage("user", "Hello!")]) as stream:
            for piece in stream.text:
                print(piece, end="", flush=True)

`AsyncClient` is the same for asyncio. Failed calls raise the errors of `quire.rpc.errors`.
"""

from quire.client.async_client import AsyncClient, AsyncStream
from quire.client.connection import ClientTls
from quire.client.retries import RetryPolicy
from quire.client.sync_client import Client, Stream
from quire.client.types import (
    Adapter,
    AnyChatMessage,
    BeamSearch,
    ChatMessage,
    Constraint,
    EarlyStopping,
    FinishReason,
    GeneratedSequence,
    Generation,
    GenerationOptions,
    JsonSchema,
    Limits,
    LoadProgress,
    Logprob,
    Model,
    PinnedPrefix,
    PositionLogprobs,
    Replica,
    ReplicaRole,
    RequestCompleted,
    SequenceFinished,
    ServerInfo,
    StreamEvent,
    StructuralTag,
    StructuralTags,
    TokenChunk,
    Tokenization,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from quire.rpc.errors import QuireError

__all__ = [
    "Adapter",
    "AnyChatMessage",
    "AsyncClient",
    "AsyncStream",
    "BeamSearch",
    "ChatMessage",
    "Client",
    "ClientTls",
    "Constraint",
    "EarlyStopping",
    "FinishReason",
    "GeneratedSequence",
    "Generation",
    "GenerationOptions",
    "JsonSchema",
    "Limits",
    "Logprob",
    "Model",
    "PinnedPrefix",
    "PositionLogprobs",
    "QuireError",
    "LoadProgress",
    "Replica",
    "ReplicaRole",
    "RequestCompleted",
    "RetryPolicy",
    "SequenceFinished",
    "ServerInfo",
    "Stream",
    "StreamEvent",
    "StructuralTag",
    "StructuralTags",
    "TokenChunk",
    "Tokenization",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "Usage",
]
