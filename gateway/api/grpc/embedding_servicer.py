"""The service of vectors and scores over gRPC; protos/quire/gateway/v1/embedding.proto specifies each method."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from typing import Any

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from gateway.api.fields import Names
from gateway.request.body_memory import keep_memory
from gateway.request.generator import Generator
from gateway.request.models import Models
from gateway.request.vectors import (
    VectorCall,
    Vectors,
    best_first,
    check_count,
    check_pairs,
    check_positive,
    paired,
    requests_for_pairs,
    requests_for_texts,
    run_partial_vectors,
    run_vectors,
)
from gateway.request.violations import Violations
from gateway.turns import Turns
from gateway.types import ModelKind, RequestOptions, optional
from quire.gateway.v1 import embedding_pb2 as pb
from quire.rpc.errors import ResourceExhausted

Context = grpc.aio.ServicerContext
_Run = Callable[[Generator, Sequence[RequestOptions], Callable[[int], Names], VectorCall], Coroutine[Any, Any, Vectors]]
MAX_RUNNING_TEXTS = 512
"""The maximum texts of a stream that run or whose vectors were not read; one request may have more by itself."""
_MAX_RESPONSE_BYTES = 1 << 20


class EmbeddingServicer:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        found = await self._vectors(request, 0, run_vectors)
        response = pb.EmbedResponse(model=found.model, prompt_tokens=sum(found.num_tokens))
        turns = Turns()
        for vector in found.vectors:
            _write_vector(response.embeddings.add(), vector)
            await turns.pause()
        return response

    async def EmbedStream(
        self, requests: AsyncIterator[pb.EmbedStreamRequest], context: Context
    ) -> AsyncIterator[pb.EmbedStreamResponse]:
        # Sent at once, since proxies wait for the headers, and the client may send its first texts late.
        await context.send_initial_metadata(())
        async with aclosing(_in_order(requests, self._patient_vectors)) as batches:
            async for batch, found in batches:
                turns = Turns()
                step = max(1, _MAX_RESPONSE_BYTES // max(1, *(each.nbytes for each in found.vectors)))
                for begin in range(0, len(found.vectors), step):
                    response = pb.EmbedStreamResponse(first_index=batch.first_index + begin, model=found.model)
                    response.prompt_tokens = sum(found.num_tokens[begin : begin + step])
                    for index, vector in enumerate(found.vectors[begin : begin + step], response.first_index):
                        _write_vector(response.embeddings.add(), vector)
                        if not len(vector):
                            response.non_finite_indices.append(index)
                        await turns.pause()
                    yield response

    async def Rerank(self, request: pb.RerankRequest, context: Context) -> pb.RerankResponse:
        violations = Violations()
        check_count(violations, "documents", len(request.documents), "document")
        check_positive(violations, "top_n", optional(request, "top_n"))
        violations.raise_if_any()
        pairs = [(request.query, each) for each in request.documents]
        found = await self._scores(request, pairs, "documents")
        scores = found.scores
        order = best_first(scores, optional(request, "top_n"))
        results = [pb.RankedDocument(index=index, relevance_score=scores[index]) for index in order]
        return pb.RerankResponse(results=results, model=found.model, prompt_tokens=sum(found.num_tokens))

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        violations = Violations()
        check_pairs(violations, len(request.text_1), len(request.text_2))
        violations.raise_if_any()
        found = await self._scores(request, paired(request.text_1, request.text_2), "text_2")
        return pb.ScoreResponse(scores=found.scores, model=found.model, prompt_tokens=sum(found.num_tokens))

    async def _patient_vectors(self, request: pb.EmbedRequest, first: int) -> Vectors:
        """As `_vectors`, but a text whose vector is not finite fails by itself, and the call waits while the limits of
        the key, or a full queue, let no more texts run."""
        while True:
            try:
                return await self._vectors(request, first, run_partial_vectors)
            except ResourceExhausted as error:
                if error.retry_after_ms is None:
                    raise
                await asyncio.sleep(error.retry_after_ms / 1000)

    async def _vectors(self, request: pb.EmbedRequest, first: int, run: _Run) -> Vectors:
        """The vectors of a request, whose texts have positions from `first` on in errors."""
        texts = _texts_of(request)
        call = VectorCall(
            optional(request, "model"),
            optional(request, "priority"),
            truncate=request.truncate,
            dimensions=optional(request, "dimensions"),
            prompt_name=optional(request, "prompt_name"),
        )

        def names(position: int) -> Names:
            place = first + position
            return Names({"text": f"texts[{place}]", "token_ids": f"token_ids[{place}]"})

        generator = self._models.of(call.model, ModelKind.VECTORS)
        requests = requests_for_texts(generator, texts, call)
        return await run(generator, requests, names, call)

    async def _scores(
        self, request: pb.RerankRequest | pb.ScoreRequest, pairs: Sequence[tuple[str, str]], field: str
    ) -> Vectors:
        call = VectorCall(optional(request, "model"), optional(request, "priority"), truncate=request.truncate)

        def names(position: int) -> Names:
            return Names({}, {"token_ids": f"{field}[{position}]", "token_ids.ids": f"{field}[{position}]"})

        generator = self._models.of(call.model, ModelKind.SCORES)
        requests = await requests_for_pairs(generator, pairs, call)
        return await run_vectors(generator, requests, names, call)


def _texts_of(request: pb.EmbedRequest) -> Sequence[str | Sequence[int]]:
    """The texts, or the token ids of each. Raises InvalidArgument if both lists have entries, or neither has."""
    violations = Violations()
    texts: Sequence[str | Sequence[int]] = request.texts or [each.ids for each in request.token_ids]
    if request.texts and request.token_ids:
        violations.add("token_ids", "has entries, and so has texts; only one of them may have entries")
    check_count(violations, "texts" if request.texts or not request.token_ids else "token_ids", len(texts), "text")
    violations.raise_if_any()
    return texts


def _write_vector(message: pb.Embedding, vector: NDArray[np.float32]) -> None:
    """Sets the numbers from the bytes of the vector, as the packed field has them: 10 us for 1,024 numbers, where a
    list of floats takes 70."""
    message.MergeFromString(_head_of(len(vector)) + vector.astype("<f4", copy=False).tobytes())


@cache
def _head_of(num_values: int) -> bytes:
    """The bytes of an Embedding before its numbers."""
    whole = pb.Embedding(values=[0.0] * num_values).SerializeToString()
    return whole[: len(whole) - 4 * num_values]


@dataclass(frozen=True, slots=True)
class _Batch:
    request: pb.EmbedRequest
    first_index: int
    num_texts: int
    answer: asyncio.Task[Vectors]


class _Window:
    """Counts the texts of a stream."""

    def __init__(self) -> None:
        self._num_texts = 0
        self._changed = asyncio.Condition()

    async def enter(self, num_texts: int) -> None:
        """Waits until there is room for the texts, or there are no others."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: not self._num_texts or self._num_texts + num_texts <= MAX_RUNNING_TEXTS
            )
            self._num_texts += num_texts

    async def leave(self, num_texts: int) -> None:
        async with self._changed:
            self._num_texts -= num_texts
            self._changed.notify()


async def _in_order(
    requests: AsyncIterator[pb.EmbedStreamRequest],
    answer: Callable[[pb.EmbedRequest, int], Coroutine[Any, Any, Vectors]],
) -> AsyncGenerator[tuple[_Batch, Vectors], None]:
    """The vectors of all requests, in order; requests run concurrently within a window. Closing this generator ends
    them all.

    Raises:
        Exception: an error of the requests or of an answer, after the answers before it.
    """
    window, batches = _Window(), asyncio.Queue[_Batch | None]()
    running: set[asyncio.Task[Vectors]] = set()

    async def read_to_the_end() -> None:
        first = 0
        async for request in requests:
            batch = request.batch
            num_texts = len(batch.texts) + len(batch.token_ids)
            await window.enter(num_texts)
            release, task = keep_memory(), asyncio.create_task(answer(batch, first))
            running.add(task)
            # As a callback, since a task that is cancelled before it begins runs none of its code.
            task.add_done_callback(lambda _, release=release: release())
            batches.put_nowait(_Batch(batch, first, num_texts, task))
            first += num_texts

    reading = asyncio.create_task(read_to_the_end())
    reading.add_done_callback(lambda _: batches.put_nowait(None))
    try:
        while (batch := await batches.get()) is not None:
            found = await batch.answer
            running.discard(batch.answer)
            yield batch, found
            await window.leave(batch.num_texts)
        await reading
    finally:
        unfinished = [reading, *running]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
