"""Vectors and scores of decoders, through a server as users run it, while its worker is killed too."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import pytest_asyncio
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer

from quire.testing import free_port
from tests.support.adapters import make_adapter, merge_adapter
from tests.support.embedding_models import PAIR_TEMPLATE, make_decoder
from tests.support.metrics import read_metric
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

QUERY = "Instruct: find the block that answers the question, and nothing else.\nQuery: "
TEXTS = ["The cat sat on the mat.", "a", "Once upon a time there was a small blue dog. " * 9, "Where are blocks kept?"]
LONG = "the cat and the dog " * 200


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    return make_decoder(path, settings={"prompts": {"query": QUERY, "document": ""}, "default_prompt_name": None})


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedder(directory: Path, metrics_port: int) -> AsyncIterator[Served]:
    async with serving(model=str(directory), dtype="float32", scheduler_metrics_port=metrics_port) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(embedder: Served) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(embedder) as running:
        yield running


def client_of(served: Served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60)


async def ask(client: httpx.AsyncClient, texts: list[str], **fields: Any) -> np.ndarray:
    answer = await client.post("/v1/embeddings", json={"input": texts, **fields})
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]], np.float32)


async def test_vectors_are_those_of_sentence_transformers(client: httpx.AsyncClient, directory: Path) -> None:
    truth = SentenceTransformer(str(directory), device="cpu")
    np.testing.assert_allclose(await ask(client, TEXTS), truth.encode(TEXTS), atol=1e-5)
    query = truth.encode(TEXTS, prompt_name="query")
    np.testing.assert_allclose(await ask(client, TEXTS, prompt_name="query"), query, atol=1e-5)
    np.testing.assert_allclose(await ask(client, [LONG], truncate=True), truth.encode([LONG]), atol=1e-5)
    short = truth.encode(TEXTS, truncate_dim=5, normalize_embeddings=True)
    np.testing.assert_allclose(await ask(client, TEXTS, dimensions=5), short, atol=1e-5)


async def test_the_server_says_what_it_takes(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/v1/embeddings", json={"input": LONG})).json()["error"]
    assert answer["code"] == "context_length_exceeded"
    answer = (await client.post("/v1/embeddings", json={"input": "a", "dimensions": 65})).json()["error"]
    assert "vectors of this model have 64 numbers: use 1 to 64" in answer["message"]
    for path, body in (("chat/completions", {"messages": [{"role": "user", "content": "a"}]}), ("rerank", {})):
        body = body or {"query": "a", "documents": ["b"]}
        assert (await client.post(f"/v1/{path}", json=body)).json()["error"]["code"] == "wrong_kind_of_model"
    tokens = (await client.post("/tokenize", json={"prompt": "a cat"})).json()
    assert tokens["tokens"][-1] == 2
    assert tokens["max_model_len"] == 480
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", 480)


async def test_texts_share_the_blocks_of_their_instruction(client: httpx.AsyncClient, metrics_port: int) -> None:
    texts = [f"{number} {text}" for number in range(20) for text in TEXTS]
    first = await ask(client, texts, prompt_name="query")
    before = await read_metric(metrics_port, "quire_scheduler_prefix_cache_hits_total")
    further = [f"{number} {text}" for number in range(20, 40) for text in TEXTS]
    await ask(client, further, prompt_name="query")
    found = await read_metric(metrics_port, "quire_scheduler_prefix_cache_hits_total") - before
    num_tokens = len((await client.post("/tokenize", json={"prompt": QUERY})).json()["tokens"]) - 1
    assert found >= num_tokens // 16 * 16 * len(further) > 0
    np.testing.assert_array_equal(await ask(client, texts, prompt_name="query"), first)


async def test_bits_of_vectors_survive_a_kill_of_the_worker(embedder: Served, client: httpx.AsyncClient) -> None:
    texts = [f"{number} {TEXTS[number % 4]} {'dog ' * (number % 37)}" for number in range(300)]
    expected = await ask(client, texts, prompt_name="query")
    killed = asyncio.create_task(ask(client, texts, prompt_name="query"))

    async def is_computing() -> bool:
        return await embedder.num_live() > 0

    await until(is_computing)
    await embedder.kill("worker")
    np.testing.assert_array_equal(await killed, expected)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_ranks_share_a_model_that_a_flag_makes_one_of_embeddings(pooling: str, tmp_path: Path) -> None:
    plain = make_decoder(tmp_path / "plain", modules=None)
    mode = {"last": "lasttoken", "mean": "mean"}[pooling]
    named = make_decoder(tmp_path / "named", modules=(("Pooling", {"pooling_mode": mode}), ("Normalize", {})))
    expected = SentenceTransformer(str(named), device="cpu").encode(TEXTS)
    flags = {"dtype": "float32", "pooling": pooling, "tensor_parallel_size": 2}
    async with serving(model=str(plain), **flags) as served, client_of(served) as client:
        np.testing.assert_allclose(await ask(client, TEXTS), expected, atol=1e-5)


@pytest.mark.extended
async def test_adapters_and_preemptions_change_no_vector(tmp_path: Path) -> None:
    """The pool holds two long texts; calls of a higher priority displace them while they are computed in chunks."""
    modules = (("Pooling", {"pooling_mode": "mean"}), ("Normalize", {}))
    path = make_decoder(tmp_path / "tiny", task="Model", modules=modules)
    model, names = transformers.AutoModel.from_pretrained(path), ["tiny", "first", "second"]
    adapters = [make_adapter(tmp_path / names[place], model, rank=3 + place, seed=place) for place in (1, 2)]
    texts = [f"{number} {LONG[: 1500 + 30 * number]}" for number in range(10)]
    truth: list[np.ndarray] = []
    for directory in (None, *adapters):
        merged = SentenceTransformer(str(path), device="cpu")
        if directory is not None:
            merge_adapter(cast(transformers.PreTrainedModel, merged[0].auto_model), directory)
        truth.append(merged.encode(texts))
    flags: dict[str, Any] = {
        "adapters": tuple(f"{name}={tmp_path / name}" for name in names[1:]),
        "policy": "priority",
        "num_gpu_blocks": 44,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "scheduler_metrics_port": free_port(),
    }
    async with serving(model=str(path), dtype="float32", **flags) as served, client_of(served) as client:
        undisturbed = [np.concatenate([await ask(client, [text], model=name) for text in texts]) for name in names]
        for found, expected in zip(undisturbed, truth, strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.abs(undisturbed[1] - undisturbed[0]).max() > 0.01
        # Whether calls meet is chance.
        for _ in range(20):
            low = [asyncio.create_task(ask(client, texts, model=name, priority=50)) for name in names]
            for round_ in range(12):
                name = round_ % 3
                found = await ask(client, texts[round_ % 10 :][:2], model=names[name], priority=-50)
                np.testing.assert_array_equal(found, undisturbed[name][round_ % 10 :][:2])
            np.testing.assert_array_equal(await asyncio.gather(*low), undisturbed)
            if await read_metric(flags["scheduler_metrics_port"], "quire_scheduler_preemptions_total"):
                return
        pytest.fail("nothing was preempted")


async def test_documents_are_ranked_with_the_template(tmp_path: Path) -> None:
    path = make_decoder(
        tmp_path / "ranker", modules=None, task="ForSequenceClassification", num_labels=1, template=PAIR_TEMPLATE
    )
    documents = [*TEXTS, LONG]
    truth = CrossEncoder(str(path), device="cpu", max_length=300)
    expected = truth.predict([("a cat", text) for text in documents])
    async with serving(model=str(path), dtype="float32", max_model_len=300) as served, client_of(served) as client:
        body = {"query": "a cat", "documents": documents}
        answer = (await client.post("/v1/rerank", json=body)).json()
        assert answer["error"]["code"] == "context_length_exceeded"
        answer = (await client.post("/v1/rerank", json=body | {"truncate": True})).json()
        scores = {each["index"]: each["relevance_score"] for each in answer["results"]}
        np.testing.assert_allclose([scores[index] for index in range(len(documents))], expected, atol=1e-5)
        answer = (await client.post("/v1/score", json={"text_1": "a cat", "text_2": TEXTS})).json()
        np.testing.assert_allclose([each["score"] for each in answer["data"]], expected[:-1], atol=1e-5)
