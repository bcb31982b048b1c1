"""Embeddings of a server, by the clients that people have, while its worker is killed too."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError, InternalServerError
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer

from tests.support.embedding_models import make_embedding_model, make_ranking_model
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

TEXTS = ["the cat sat on the mat", "a", "once upon a time there was a small blue dog", "big red hat"]
LONG = "the cat " * 40
MODULES = (
    ("Pooling", {"pooling_mode_mean_tokens": True}),
    ("Dense", {"in_features": 48, "out_features": 24, "bias": True, "activation_function": "torch.nn.Tanh"}),
    ("Normalize", None),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"prompts": {"query": "a cat: "}, "default_prompt_name": None}
    return make_embedding_model(tmp_path_factory.mktemp("models") / "tiny", modules=MODULES, settings=settings)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedder(directory: Path) -> AsyncIterator[Served]:
    async with serving(model=str(directory), dtype="float32") as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(embedder: Served) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://{embedder.server.http_address}/v1"
    async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as running:
        yield running


async def ask(client: AsyncOpenAI, texts: list[str] | list[list[int]] | str, **fields) -> np.ndarray:
    answer = await client.embeddings.create(model="tiny", input=texts, **fields)
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data], np.float32)


async def test_vectors_are_those_of_sentence_transformers(client: AsyncOpenAI, directory: Path) -> None:
    truth = SentenceTransformer(str(directory), device="cpu")
    expected = truth.encode(TEXTS)
    # The client asks for base64 unless it is told otherwise.
    found = await ask(client, TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_array_equal(await ask(client, TEXTS, encoding_format="float"), found)
    np.testing.assert_allclose(await ask(client, TEXTS[1]), expected[1:2], atol=1e-5)
    query = await ask(client, TEXTS, extra_body={"prompt_name": "query"})
    np.testing.assert_allclose(query, truth.encode(TEXTS, prompt_name="query"), atol=1e-5)
    cut = await ask(client, LONG, extra_body={"truncate": True})
    np.testing.assert_allclose(cut, truth.encode([LONG]), atol=1e-5)
    short = await ask(client, TEXTS, dimensions=5)
    np.testing.assert_allclose(short, truth.encode(TEXTS, truncate_dim=5, normalize_embeddings=True), atol=1e-5)
    ids = truth.tokenizer(TEXTS, padding=False)["input_ids"]
    np.testing.assert_array_equal(await ask(client, ids), found)
    answer = await client.embeddings.create(model="tiny", input=TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"input": []}, "invalid_argument", "input is empty"),
        ({"input": [TEXTS[0]] * 2049}, "invalid_argument", "input has 2,049 entries; the max is 2,048"),
        ({"input": [TEXTS[0], LONG]}, "context_length_exceeded", r"input\[1\] has"),
        ({"input": "a", "dimensions": 25}, "invalid_argument", "vectors of this model have 24 numbers: use 1 to 24"),
        ({"input": [[999]]}, "invalid_argument", r"input\[0\]\.ids\[0\] is 999"),
        ({"input": "a", "extra_body": {"prompt_name": "no"}}, "invalid_argument", "the model has the prompts query"),
    ],
)
async def test_what_has_no_vector_is_refused(client: AsyncOpenAI, fields: dict, code: str, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        await client.embeddings.create(model="tiny", **fields)
    assert caught.value.code == code


async def test_a_model_of_embeddings_generates_no_text(client: AsyncOpenAI, openai_client: AsyncOpenAI) -> None:
    with pytest.raises(BadRequestError, match="gives embeddings; send this to") as caught:
        await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    assert caught.value.code == "wrong_kind_of_model"
    with pytest.raises(BadRequestError, match="generates text; send this to") as caught:
        await openai_client.embeddings.create(model="quire-tiny", input="a")
    assert caught.value.code == "wrong_kind_of_model"


async def test_vectors_of_many_texts_survive_a_kill_of_the_worker(embedder: Served, client: AsyncOpenAI) -> None:
    texts = [f"{TEXTS[number % 4]} {'dog ' * (number % 17)}" for number in range(600)]
    expected = await ask(client, texts)
    killed = asyncio.create_task(ask(client, texts))

    async def is_computing() -> bool:
        return await embedder.num_live() > 0

    await until(is_computing)
    await embedder.kill("worker")
    np.testing.assert_allclose(await killed, expected, atol=1e-5)


async def test_a_text_whose_vector_is_not_finite_fails_and_no_other(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "tiny", "modernbert")
    weights = load_file(path / "model.safetensors")
    row = json.loads((path / "tokenizer.json").read_text())["model"]["vocab"]["hat"]
    weights["embeddings.tok_embeddings.weight"][row] = float("nan")
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    async with serving(model=str(path), dtype="float32") as served:
        url = f"http://{served.server.http_address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
            (model,) = (await client.models.list()).data
            assert model.model_dump()["max_model_len"] == 32
            bad, good = await asyncio.gather(ask(client, "big red hat"), ask(client, TEXTS[:3]), return_exceptions=True)
            assert isinstance(bad, InternalServerError)
            assert isinstance(good, np.ndarray)
            assert (bad.code, bad.param) == ("non_finite_vector", "input")
            assert "the vector of input, or its score, holds NaN or infinity (1 of 1 texts)" in bad.message
            np.testing.assert_allclose(good, SentenceTransformer(str(path), device="cpu").encode(TEXTS[:3]), atol=1e-4)


async def test_documents_are_put_in_order_and_pairs_scored(tmp_path: Path) -> None:
    make_ranking_model(tmp_path / "ranker", types=True)
    truth = CrossEncoder(str(tmp_path / "ranker"), device="cpu")
    expected = truth.predict([("a cat", text) for text in TEXTS])
    async with (
        serving(model=str(tmp_path / "ranker"), dtype="float32") as ranker,
        httpx.AsyncClient(base_url=f"http://{ranker.server.http_address}", timeout=60) as client,
    ):
        documents = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
        for path in ("/v1/rerank", "/v2/rerank"):
            fields = {"query": "a cat", "documents": documents, "top_n": 3, "return_documents": True}
            answer = (await client.post(path, json=fields)).json()
            order = [each["index"] for each in answer["results"]]
            assert order == np.argsort(-expected)[:3].tolist()
            assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[index] for index in order]
            scores = [each["relevance_score"] for each in answer["results"]]
            np.testing.assert_allclose(scores, expected[order], atol=1e-5)
        answer = (await client.post("/v1/score", json={"text_1": "a cat", "text_2": TEXTS})).json()
        np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-5)
        answer = await client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": TEXTS})
        assert answer.json()["error"]["message"].startswith("text_1 has 2 texts, and text_2 4")
        answer = await client.post("/v1/rerank", json={"query": "a", "documents": []})
        assert answer.json()["error"]["message"].startswith("documents is empty")
        answer = await client.post("/v1/rerank", json={"query": LONG, "documents": ["a"]})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = await client.post("/v1/rerank", json={"query": "a " * 5000, "documents": ["a"] * 2000})
        assert "have 20,002,000 characters" in answer.json()["error"]["message"]
        answer = await client.post("/v1/embeddings", json={"input": "a"})
        assert "ranks documents; send this to a server with a model that gives" in answer.json()["error"]["message"]
