"""Vectors and scores over gRPC, from a scheduler that makes them of token ids: forms, errors, order and flow."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio

from gateway.api.grpc.embedding_servicer import MAX_RUNNING_TEXTS
from quire.gateway.v1 import embedding_pb2 as pb
from quire.gateway.v1.embedding_pb2_grpc import EmbeddingServiceStub
from quire.rpc.errors import InvalidArgument, QuireError, ResourceExhausted, Unimplemented
from quire.scheduler.v1 import scheduler_pb2
from tests.support.embedding_models import make_embedding_model, make_ranking_model
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, error_of, running_gateway

SIZE = 48
LONG = "the cat " * 40


def vector_of(prompt: tuple[int, ...]) -> list[float]:
    """Different for different prompts."""
    return [float(sum(prompt) + len(prompt) * place) for place in range(1, SIZE + 1)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[FakeScheduler, RunningGateway]]:
    settings = {"prompts": {"query": "a cat "}, "default_prompt_name": None}
    model = make_embedding_model(tmp_path_factory.mktemp("models") / "tiny", settings=settings)
    fake = FakeScheduler(vector=vector_of, architecture="BertModel", vocab_size=78, max_model_len=33)
    async with fake as scheduler, running_gateway(scheduler, model=str(model)) as gateway:
        yield scheduler, gateway


@pytest.fixture
def scheduler(embedder: tuple[FakeScheduler, RunningGateway]) -> FakeScheduler:
    embedder[0].submits.clear()
    embedder[0].emits.set()
    return embedder[0]


@pytest.fixture
def stub(embedder: tuple[FakeScheduler, RunningGateway]) -> Any:
    return EmbeddingServiceStub(embedder[1].channel)


def numbers(embeddings: Iterable[pb.Embedding]) -> np.ndarray:
    return np.array([each.values for each in embeddings], np.float32)


async def over_http(gateway: RunningGateway, **body) -> np.ndarray:
    answer = (await gateway.http.post("/v1/embeddings", json=body)).json()
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


@pytest.mark.parametrize(
    "fields", [{}, {"dimensions": 5}, {"prompt_name": "query"}, {"truncate": True}], ids=lambda fields: str(fields)
)
async def test_vectors_are_those_of_http(embedder, scheduler, stub, fields: dict) -> None:
    texts = ["the cat", "a dog", LONG if fields.get("truncate") else "big"]
    answer = await stub.Embed(pb.EmbedRequest(texts=texts, **fields))
    expected = await over_http(embedder[1], input=texts, **fields)
    np.testing.assert_array_equal(numbers(answer.embeddings), expected)
    prompts = [np.frombuffer(each.prompt_token_ids, np.int32) for each in scheduler.submits[:3]]
    assert (answer.model, answer.prompt_tokens) == ("tiny", sum(map(len, prompts)))
    of_ids = pb.EmbedRequest(token_ids=[{"ids": ids.tolist()} for ids in prompts], dimensions=fields.get("dimensions"))
    np.testing.assert_array_equal(numbers((await stub.Embed(of_ids)).embeddings), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "texts is empty; it must have at least one text"),
        ({"texts": ["a"], "token_ids": [{"ids": [1]}]}, "token_ids has entries, and so has texts"),
        ({"texts": ["a"] * 2049}, "texts has 2,049 entries; the max is 2,048"),
        ({"texts": ["a", LONG]}, r"texts\[1\] has at least \d+ tokens; a prompt may have at most 32"),
        ({"token_ids": [{"ids": [1]}, {"ids": [2, 99]}]}, r"token_ids\[1\]\.ids\[1\] is 99; token ids of this model"),
        ({"texts": ["a"], "dimensions": 0}, "dimensions is 0; vectors of this model have 48 numbers: use 1 to 48"),
        ({"texts": ["a"], "prompt_name": "no"}, 'prompt_name is "no"; the model has the prompts query'),
        ({"texts": ["a"], "priority": 101}, r"priority is 101; it must be in \[-100, 100\]"),
    ],
)
async def test_what_has_no_vector_is_named(scheduler, stub, fields: dict, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        raise await error_of(stub.Embed(pb.EmbedRequest(**fields)))
    assert not scheduler.submits


def batches(*sizes: int, text: Callable[[int], str] = lambda place: "cat " * (1 + place % 7)) -> list:
    starts = np.cumsum([0, *sizes])
    return [
        pb.EmbedStreamRequest(batch=pb.EmbedRequest(texts=[text(start + place) for place in range(size)]))
        for start, size in zip(starts, sizes, strict=False)
    ]


async def test_a_stream_gives_vectors_in_order_with_their_positions(scheduler, stub) -> None:
    sizes = (1, 700, 3, 200)
    found = [each async for each in stub.EmbedStream(iter(batches(*sizes)), timeout=60)]
    starts = np.cumsum([0, *(len(each.embeddings) for each in found)])
    assert [each.first_index for each in found] == starts[:-1].tolist()
    got = numbers(vector for each in found for vector in each.embeddings)
    assert len(got) == starts[-1] == sum(sizes)
    np.testing.assert_array_equal(got, got[[place % 7 for place in range(len(got))]])
    assert sum(each.prompt_tokens for each in found) == sum(3 + place % 7 for place in range(len(got)))


async def test_an_error_of_a_stream_comes_after_the_vectors_before_it(scheduler, stub) -> None:
    call = stub.EmbedStream(iter(batches(2, 3, 2, text=lambda place: LONG if place == 4 else "a")), timeout=60)
    assert (await call.read()).first_index == 0
    with pytest.raises(InvalidArgument, match=r"texts\[4\] has"):
        raise await error_of(call.read())
    await scheduler.until(lambda: not scheduler.live)


async def test_a_stream_runs_few_texts_until_their_vectors_are_read_and_aborts_them_with_the_call(
    scheduler, stub
) -> None:
    scheduler.emits.clear()
    call = stub.EmbedStream(iter(batches(*[100] * 30)), timeout=60)
    reading = asyncio.create_task(call.read())
    await scheduler.until(lambda: len(scheduler.live) == MAX_RUNNING_TEXTS // 100 * 100)
    scheduler.emits.set()
    assert (await reading).first_index == 0
    await asyncio.sleep(0.3)
    # Each response that the client has not read holds its texts' places, but for what gRPC buffers.
    scheduler.emits.clear()
    await scheduler.until(lambda: scheduler.live)
    call.cancel()
    await scheduler.until(lambda: not scheduler.live)


async def test_a_full_queue_makes_a_stream_wait_and_refuses_one_call(scheduler, stub) -> None:
    full = scheduler_pb2.RequestFailure(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], reason="QUEUE_FULL", message="full", retry_after_ms=20
    )
    scheduler.refusal.append(full)
    assert isinstance(await error_of(stub.Embed(pb.EmbedRequest(texts=["a"]))), ResourceExhausted)
    scheduler.refusal.extend([full] * 3)
    found = [each async for each in stub.EmbedStream(iter(batches(2)), timeout=60)]
    assert len(found[0].embeddings) == 2


async def test_documents_are_ranked_and_pairs_scored(tmp_path: Path) -> None:
    model = make_ranking_model(tmp_path / "ranker")
    fake = FakeScheduler(
        vector=lambda prompt: [sum(prompt) / 1000], vocab_size=78, max_model_len=63, checks_hello=False
    )
    async with fake as scheduler, running_gateway(scheduler, model=str(model), max_message_bytes=65536) as gateway:
        stub: Any = EmbeddingServiceStub(gateway.channel)
        documents = ["the", "a dog", "small blue hat"]
        scored = await stub.Score(pb.ScoreRequest(text_1=["cat"], text_2=documents))
        assert scored.prompt_tokens == sum(len(each.prompt_token_ids) // 4 for each in scheduler.submits)
        assert len(set(scored.scores)) == 3
        both = await stub.Score(pb.ScoreRequest(text_1=["cat"] * 3, text_2=documents))
        assert both.scores == scored.scores
        ranked = (await stub.Rerank(pb.RerankRequest(query="cat", documents=documents, top_n=2))).results
        order = sorted(range(3), key=lambda place: -scored.scores[place])[:2]
        assert [(each.index, each.relevance_score) for each in ranked] == [(i, scored.scores[i]) for i in order]
        refused: list[tuple[Any, type[QuireError], str]] = [
            (pb.RerankRequest(query="a"), InvalidArgument, "documents is empty"),
            (pb.RerankRequest(query="a", documents=["a"], top_n=0), InvalidArgument, "top_n is 0; it must be at least"),
            (pb.RerankRequest(query="a", documents=["a"] * 2049), InvalidArgument, "more than 2,048 entries"),
            (pb.RerankRequest(query="a", documents=["a", LONG]), InvalidArgument, r"documents\[1\] has 84 tokens"),
            (pb.RerankRequest(query="a " * 50, documents=["a"] * 900), InvalidArgument, "have 90,900 characters"),
            (pb.ScoreRequest(text_1=["a", "b"], text_2=["a"]), InvalidArgument, "text_1 has 2 texts, and text_2 1"),
            (pb.EmbedRequest(texts=["a"]), Unimplemented, "ranks documents; send this to a server with a model that"),
        ]
        methods = {pb.RerankRequest: stub.Rerank, pb.ScoreRequest: stub.Score, pb.EmbedRequest: stub.Embed}
        for request, kind, message in refused:
            with pytest.raises(kind, match=message):
                raise await error_of(methods[type(request)](request))
