"""The Python client of a Quire gateway.

    from quire.client import ChatMessage, Client, GenerationOptions

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", GenerationOptions(max_tokens=40)).text)
        with client.chat_stream([ChatMessage("user", "Hello!")]) as stream:
            for piece in stream.text:
                print(piece, end="", flush=True)

`AsyncClient` is the same for asyncio. Failed calls raise the errors of `quire.rpc.errors`.
"""

# ruff: noqa: I001  (one import for each module)

from quire.client.async_client import AsyncClient as AsyncClient, AsyncStream as AsyncStream
from quire.client.connection import ClientTls as ClientTls
from quire.client.retries import RetryPolicy as RetryPolicy
from quire.client.sync_client import Client as Client, Stream as Stream
from quire.client.types import (
    Adapter as Adapter,
    AnyChatMessage as AnyChatMessage,
    BeamSearch as BeamSearch,
    ChatMessage as ChatMessage,
    Constraint as Constraint,
    EarlyStopping as EarlyStopping,
    Embeddings as Embeddings,
    FinishReason as FinishReason,
    GeneratedSequence as GeneratedSequence,
    Generation as Generation,
    GenerationOptions as GenerationOptions,
    JsonSchema as JsonSchema,
    Limits as Limits,
    LoadProgress as LoadProgress,
    Logprob as Logprob,
    Model as Model,
    PinnedPrefix as PinnedPrefix,
    PositionLogprobs as PositionLogprobs,
    RankedDocument as RankedDocument,
    Ranking as Ranking,
    Replica as Replica,
    ReplicaRole as ReplicaRole,
    RequestCompleted as RequestCompleted,
    Scores as Scores,
    SequenceFinished as SequenceFinished,
    ServerInfo as ServerInfo,
    StreamEvent as StreamEvent,
    StructuralTag as StructuralTag,
    StructuralTags as StructuralTags,
    TokenChunk as TokenChunk,
    Tokenization as Tokenization,
    Tool as Tool,
    ToolCall as ToolCall,
    ToolCallDelta as ToolCallDelta,
    Usage as Usage,
)
from quire.rpc.errors import QuireError as QuireError
