"""Vectors and scores over gRPC and KServe, by clients and commands, from a scheduler that makes them of token ids."""

import asyncio
import base64
import io
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
from huggingface_hub import InferenceClient

from gateway.api.grpc.embedding_servicer import MAX_RUNNING_TEXTS
from gateway.api.kserve.inference import bytes_of
from quire.client import AsyncClient, Client
from quire.gateway.v1 import embedding_pb2 as pb
from quire.gateway.v1.embedding_pb2_grpc import EmbeddingServiceStub
from quire.inference import open_inference_pb2 as kserve
from quire.rpc.errors import Internal, InvalidArgument, QuireError, ResourceExhausted, Unimplemented
from quire.scheduler.v1 import scheduler_pb2
from quire_cli.main import main
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, error_of
from tests.support.vector_gateways import SIZE, Rig, ranking_gateway, vector_gateway

LONG = "the cat " * 40
DOCUMENTS = ["the", "a dog", "small blue hat"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def embedder(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with vector_gateway(tmp_path_factory.mktemp("models")) as rig:
        yield rig


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with ranking_gateway(tmp_path_factory.mktemp("models")) as rig:
        yield rig


@pytest.fixture
def scheduler(embedder: Rig) -> FakeScheduler:
    embedder[0].submits.clear()
    embedder[0].emits.set()
    return embedder[0]


@pytest.fixture
def stub(embedder: Rig) -> Any:
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


async def test_a_stream_runs_few_texts_at_once_and_aborts_them_with_the_call(scheduler, stub) -> None:
    scheduler.emits.clear()
    call = stub.EmbedStream(iter(batches(*[100] * 30)), timeout=60)
    reading = asyncio.create_task(call.read())
    await scheduler.until(lambda: len(scheduler.live) == MAX_RUNNING_TEXTS // 100 * 100)
    await asyncio.sleep(0.1)
    assert len(scheduler.submits) == MAX_RUNNING_TEXTS // 100 * 100
    call.cancel()
    await scheduler.until(lambda: not scheduler.live)
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_full_queue_makes_a_stream_wait_and_refuses_one_call(scheduler, stub) -> None:
    full = scheduler_pb2.RequestFailure(
        code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], reason="QUEUE_FULL", message="full", retry_after_ms=20
    )
    scheduler.refusal.append(full)
    assert isinstance(await error_of(stub.Embed(pb.EmbedRequest(texts=["a"]))), ResourceExhausted)
    scheduler.refusal.extend([full] * 3)
    found = [each async for each in stub.EmbedStream(iter(batches(2)), timeout=60)]
    assert len(found[0].embeddings) == 2


async def test_texts_whose_vectors_are_not_finite_are_named_and_harm_no_other(embedder, scheduler, stub) -> None:
    texts = [f"cat {'dog ' * place}" for place in range(12)]
    expected = await over_http(embedder[1], input=texts)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: embedder[1].http.post("/v1/embeddings", json={"input": texts}), "input"),
        (lambda: embedder[1].http.post("/v2/embed", json={"texts": texts}), "texts"),
        (lambda: error_of(stub.Embed(pb.EmbedRequest(texts=texts))), "texts"),
    ]
    for call, field in calls:
        scheduler.submits.clear()
        scheduler.emits.clear()
        answer = asyncio.create_task(call())
        other = asyncio.create_task(over_http(embedder[1], input=texts[:2]))
        await scheduler.until(lambda: len(scheduler.submits) == 14)
        bad = [
            handle for handle, each in scheduler.live.items() if len(each.submit.prompt_token_ids) in (4 * 6, 4 * 10)
        ]
        for handle in bad:
            scheduler.fail(handle, code=13, reason="NON_FINITE_LOGITS", message="holds NaN")
        scheduler.emits.set()
        failed = await answer
        message = f"the vector of {field}[3], {field}[7], or its score, holds NaN or infinity (2 of 12 texts)"
        if isinstance(failed, Internal):
            assert (failed.reason, [each.field for each in failed.violations]) == (
                "NON_FINITE_VECTOR",
                [f"{field}[3]", f"{field}[7]"],
            )
            assert message in failed.message
        else:
            error = failed.json()["error"]
            assert (failed.status_code, error["code"], error["param"]) == (500, "non_finite_vector", f"{field}[3]")
            assert message in error["message"]
        np.testing.assert_array_equal(await other, expected[:2])


async def test_a_stream_gives_the_other_vectors_if_some_are_not_finite(embedder, scheduler, stub) -> None:
    texts = [f"cat {'dog ' * place}" for place in range(9)]
    expected = await over_http(embedder[1], input=texts)
    scheduler.submits.clear()
    scheduler.emits.clear()
    failing = {0, 4, 5, 7}
    sizes = (4, 2, 3)
    call = stub.EmbedStream(iter(batches(*sizes, text=lambda place: texts[place])), timeout=60)
    reading = asyncio.create_task(collected(call))
    await scheduler.until(lambda: len(scheduler.submits) == 9)
    lengths = {4 * (3 + place) for place in failing}
    for handle in [handle for handle, each in scheduler.live.items() if len(each.submit.prompt_token_ids) in lengths]:
        scheduler.fail(handle, code=13, reason="NON_FINITE_LOGITS", message="holds NaN")
    scheduler.emits.set()
    found = await reading
    assert [(each.first_index, list(each.non_finite_indices)) for each in found] == [(0, [0]), (4, [4, 5]), (6, [7])]
    assert [each.prompt_tokens for each in found] == [4 + 5 + 6, 0, 9 + 11]
    vectors = [each for answer in found for each in answer.embeddings]
    assert {place for place, each in enumerate(vectors) if not each.values} == failing
    good = [place for place in range(9) if place not in failing]
    np.testing.assert_array_equal(numbers(vectors[place] for place in good), expected[good])


async def collected(call: Any) -> list[Any]:
    return [each async for each in call]


async def test_documents_are_ranked_and_pairs_scored(ranker) -> None:
    scheduler, gateway = ranker
    stub: Any = EmbeddingServiceStub(gateway.channel)
    scored = await stub.Score(pb.ScoreRequest(text_1=["cat"], text_2=DOCUMENTS))
    assert scored.prompt_tokens == sum(len(each.prompt_token_ids) // 4 for each in scheduler.submits)
    assert len(set(scored.scores)) == 3
    both = await stub.Score(pb.ScoreRequest(text_1=["cat"] * 3, text_2=DOCUMENTS))
    assert both.scores == scored.scores
    ranked = (await stub.Rerank(pb.RerankRequest(query="cat", documents=DOCUMENTS, top_n=2))).results
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


def tensor_request(
    model: str, *, raw: bool = False, parameters: dict[str, Any] | None = None, **inputs: list[str]
) -> Any:
    request = kserve.ModelInferRequest(model_name=model, id="mine")
    for name, texts in inputs.items():
        elements = [each.encode() for each in texts]
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[len(texts)])
        if raw:
            request.raw_input_contents.append(bytes_of("BYTES", elements))
        else:
            tensor.contents.bytes_contents.extend(elements)
    for name, value in (parameters or {}).items():
        field = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request


async def infer(gateway: RunningGateway, request: Any, method: str = "ModelInfer") -> kserve.ModelInferResponse:
    call = gateway.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
    return kserve.ModelInferResponse.FromString(await call(request.SerializeToString(), timeout=30))


def numbers_of(found: kserve.ModelInferResponse, place: int) -> np.ndarray:
    """The numbers of an output, which are raw bytes or a list."""
    output = found.outputs[place]
    if found.raw_output_contents:
        dtype = np.float32 if output.datatype == "FP32" else np.uint32
        return np.frombuffer(found.raw_output_contents[place], dtype)
    contents = output.contents
    return np.array([*contents.fp32_contents, *contents.uint_contents], np.float32)


@pytest.mark.parametrize("raw", [False, True])
async def test_tensors_have_the_same_vectors_and_scores(embedder, scheduler, ranker, stub, raw: bool) -> None:
    texts, fields = ["the cat", "a dog"], {"dimensions": 5, "prompt_name": "query", "truncate": "true"}
    request = tensor_request("tiny", raw=raw, parameters=fields, text_input=texts)
    found = await infer(embedder[1], request)
    (output,) = found.outputs
    assert (output.name, output.datatype, list(output.shape), found.id) == ("embedding", "FP32", [2, 5], "mine")
    expected = numbers((await stub.Embed(pb.EmbedRequest(texts=texts, dimensions=5, prompt_name="query"))).embeddings)
    np.testing.assert_array_equal(numbers_of(found, 0), expected.ravel())
    request = tensor_request("ranker", raw=raw, query=["cat"], documents=DOCUMENTS)
    request.outputs.extend(request.InferRequestedOutputTensor(name=name) for name in ("scores", "num_input_tokens"))
    found = await infer(ranker[1], request)
    assert [(each.name, each.datatype, list(each.shape)) for each in found.outputs] == [
        ("scores", "FP32", [3]),
        ("num_input_tokens", "UINT32", [3]),
    ]
    scored = await EmbeddingServiceStub(ranker[1].channel).Score(pb.ScoreRequest(text_1=["cat"], text_2=DOCUMENTS))
    np.testing.assert_array_equal(numbers_of(found, 0), np.array(scored.scores, np.float32))
    assert sum(numbers_of(found, 1)) == scored.prompt_tokens


async def test_tensors_of_vectors_over_http_and_their_metadata(embedder, ranker) -> None:
    http, tensor = embedder[1].http, {"name": "text_input", "datatype": "BYTES", "shape": [2], "data": ["cat", "a dog"]}
    metadata = (await http.get("/v2/models/tiny")).json()
    assert metadata["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [-1]}]
    assert metadata["outputs"][0] == {"name": "embedding", "datatype": "FP32", "shape": [-1, SIZE]}
    ranking = (await ranker[1].http.get("/v2/models/ranker")).json()
    assert [each["name"] for each in ranking["inputs"] + ranking["outputs"]] == [
        *("query", "documents", "scores", "num_input_tokens")
    ]
    answer = (await http.post("/v2/models/tiny/infer", json={"inputs": [tensor]})).json()["outputs"]
    expected = (await over_http(embedder[1], input=tensor["data"])).ravel().tolist()
    assert answer == [{"name": "embedding", "datatype": "FP32", "shape": [2, SIZE], "data": expected}]
    for path, body, message in (
        ("infer", {"inputs": [tensor | {"name": "text"}]}, r'is "text"; the inputs of this model are text_input'),
        ("infer", {"inputs": [tensor], "parameters": {"dimensions": 99}}, 'parameters["dimensions"] is 99; vectors of'),
        (
            "infer",
            {"inputs": [tensor], "parameters": {"dimensions": "x"}},
            'parameters["dimensions"] must be an integer',
        ),
        ("infer", {"inputs": [tensor | {"data": ["a", LONG]}]}, "inputs[0].data[1] has at least"),
        ("generate", {"text_input": "a"}, "gives embeddings; send this to a server with a model that generates text"),
    ):
        refused = await http.post(f"/v2/models/tiny/{path}", json=body)
        assert refused.status_code in (400, 501)
        assert message in refused.json()["error"]


async def test_coheres_form_has_the_same_vectors_in_each_format(embedder, scheduler) -> None:
    rig, texts = embedder[1], ["the cat", "a dog", LONG]
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    body = {"texts": texts, "input_type": "search_query", "embedding_types": types}
    answer = (await rig.http.post("/v2/embed", json=body)).json()
    expected = await over_http(rig, input=texts, prompt_name="query", truncate=True)
    found = answer["embeddings"]
    assert list(found) == types
    np.testing.assert_array_equal(np.array(found["float"], np.float32), expected)
    assert np.frombuffer(base64.b64decode(found["base64"][1]), "<f4").tolist() == found["float"][1]
    assert np.abs(np.array(found["int8"]) - 127 * expected / expected.max(axis=1, keepdims=True)).max() <= 0.5
    assert (np.array(found["uint8"]) - 128).tolist() == found["int8"]
    assert found["ubinary"] == np.packbits(expected > 0, axis=1).tolist()
    assert (np.array(found["ubinary"]) - 128).tolist() == found["binary"]
    assert answer["meta"]["billed_units"] == {
        "input_tokens": sum(len(each.prompt_token_ids) // 4 for each in scheduler.submits[:3])
    }
    begins, ends = (np.frombuffer(each.prompt_token_ids, np.int32) for each in scheduler.submits[:3:2])
    assert (begins[0], begins[-1]) == (ends[0], ends[-1])
    scheduler.submits.clear()
    short = (await rig.http.post("/v2/embed", json={"texts": ["big " + LONG], "truncate": "START"})).json()
    (cut,) = (np.frombuffer(each.prompt_token_ids, np.int32) for each in scheduler.submits)
    of_end = await over_http(rig, input=cut.tolist())
    np.testing.assert_array_equal(np.array(short["embeddings"]["float"], np.float32), of_end)
    assert (len(cut), cut[0], cut[-1]) == (len(ends), ends[0], ends[-1])
    assert len((await over_http(rig, input=[cut.tolist()], dimensions=8))[0]) == 8


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v2/embed", {"texts": []}, "texts is empty; it must have at least one text"),
        ("/v2/embed", {"texts": ["a"], "input_type": "image"}, "input_type"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["float", "int4"]}, "embedding_types[1]"),
        (
            "/v2/embed",
            {"texts": ["a"], "output_dimension": 49},
            "output_dimension is 49; vectors of",
        ),
        (
            "/v2/embed",
            {"texts": ["a"], "output_dimension": 9, "embedding_types": ["binary"]},
            "packs 8 numbers into one",
        ),
        ("/v2/embed", {"texts": ["a", LONG], "truncate": "NONE"}, "texts[1] has"),
        ("/v2/embed", {"images": ["data:"], "texts": ["a"]}, "images"),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 5}, "; shorten the texts"),
        ("/embed", {"inputs": [], "normalize": True}, "inputs is empty"),
        ("/embed", {"inputs": ["a", LONG]}, "inputs[1] has"),
        ("/embed", {"inputs": 5}, "a string or a list of strings"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "inputs.sentences is empty"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["a", LONG]}}, "inputs.sentences[1] has"),
        ("/rerank", {"query": "a", "texts": ["a"]}, "wrong_kind_of_model"),
    ],
)
async def test_other_forms_name_what_has_no_vector(embedder, scheduler, path: str, body: dict, message: str) -> None:
    response = await embedder[1].http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert message in f"{error['message']} {error['code']}"
    assert not scheduler.submits


async def test_the_client_of_hugging_face_gets_vectors_similarities_and_ranks(embedder, ranker, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    url = embedder[1].http_url
    embeds, compares = InferenceClient(f"{url}/embed"), InferenceClient(f"{url}/similarity")
    vectors = await asyncio.to_thread(embeds.feature_extraction, "the cat", truncate=True, truncation_direction="left")
    expected = await over_http(embedder[1], input=["the cat", "a dog"])
    scaled = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, scaled[:1], rtol=1e-6)
    cosines = await asyncio.to_thread(compares.sentence_similarity, "the cat", other_sentences=["the cat", "a dog"])
    np.testing.assert_allclose(cosines, [1, scaled[0] @ scaled[1]], rtol=1e-6)
    raw = (await embedder[1].http.post("/embed", json={"inputs": ["a dog"], "normalize": False})).json()
    np.testing.assert_array_equal(np.array(raw, np.float32), expected[1:])
    body = {"query": "cat", "texts": DOCUMENTS, "return_text": True}
    ranks = (await ranker[1].http.post("/rerank", json=body)).json()
    ours = (await ranker[1].http.post("/v2/rerank", json={"query": "cat", "documents": DOCUMENTS})).json()
    assert ranks == [
        {"index": each["index"], "score": each["relevance_score"], "text": DOCUMENTS[each["index"]]}
        for each in ours["results"]
    ]
    assert ours["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}


async def test_the_first_version_of_coheres_form_has_plain_vectors(embedder) -> None:
    rig, texts = embedder[1], ["the cat", "a dog"]
    plain = (await rig.http.post("/v1/embed", json={"texts": texts})).json()
    by_type = (await rig.http.post("/v1/embed", json={"texts": texts, "embedding_types": ["float"]})).json()
    assert (plain["response_type"], by_type["response_type"]) == ("embeddings_floats", "embeddings_by_type")
    assert plain["embeddings"] == by_type["embeddings"]["float"]
    np.testing.assert_array_equal(np.array(plain["embeddings"], np.float32), await over_http(rig, input=texts))
    assert plain["meta"]["api_version"] == {"version": "1"}


async def test_documents_are_cut_at_max_tokens_per_doc(ranker) -> None:
    async def scores(path: str = "/v1/rerank", **fields: object) -> list[float] | str:
        answer = (await ranker[1].http.post(path, json={"query": "cat", **fields})).json()
        if "error" in answer:
            return answer["error"]["message"]
        return [each["relevance_score"] for each in sorted(answer["results"], key=lambda each: each["index"])]

    documents = ["small blue hat", "a dog", "the"]
    short = await scores(documents=["small blue", "a dog", "the"])
    assert await scores(documents=documents, max_tokens_per_doc=2) == short != await scores(documents=documents)
    assert await scores(documents=documents, max_tokens_per_doc=4096) == await scores(documents=documents)
    assert "max_tokens_per_doc is 0; it must be at least 1" in str(
        await scores(documents=documents, max_tokens_per_doc=0)
    )
    # Cohere cuts what is too long, and the others refuse it.
    cut = await scores(documents=[LONG], truncate=True)
    assert await scores("/v2/rerank", documents=[LONG]) == cut
    assert "tokens" in (refused := str(await scores("/v2/rerank", documents=[LONG], truncate=False)))
    assert refused == await scores(documents=[LONG])


async def test_python_clients_and_commands_give_the_same(
    embedder, scheduler, ranker, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"cat {'dog ' * (place % 9)}" for place in range(300)]
    expected = await over_http(embedder[1], input=texts, prompt_name="query", dimensions=7)
    async with AsyncClient(embedder[1].gateway.grpc_address) as client:
        answer = await client.embed(texts, prompt_name="query", dimensions=7)
        np.testing.assert_array_equal(np.asarray(answer.vectors), expected)
        assert (answer.model, (await client.embed([[2, 5, 3], [2, 3]])).prompt_tokens) == ("tiny", 5)
        assert len((await client.embed("a")).vectors) == 1
        with pytest.raises(InvalidArgument, match=r"texts\[1\] is \[-1\]"):
            await client.embed([[2], [-1]])

        async def batches(*sizes: int) -> AsyncIterator[list[str]]:
            for begin, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
                yield texts[begin : begin + size]

        parts = [part async for part in client.embed_stream(batches(5, 200, 95), prompt_name="query", dimensions=7)]
        np.testing.assert_array_equal([vector for part in parts for vector in part.vectors], expected)
        answers = client.embed_stream([texts[:5], [LONG]])
        assert len((await anext(answers)).vectors) == 5
        with pytest.raises(InvalidArgument, match=r"texts\[5\] has"):
            await anext(answers)
        async for _ in client.embed_stream(["a"] * 10_000):
            break
        await scheduler.until(lambda: not scheduler.live)

    def command(*words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status = main(words)
        output, errors = capsys.readouterr()
        return status, output, errors

    def rank() -> None:
        with Client(ranker[1].gateway.grpc_address) as client:
            scored = client.score("cat", DOCUMENTS)
            ranking = client.rerank("cat", DOCUMENTS, top_n=2)
            assert [scored.scores[each.index] for each in ranking.results] == sorted(scored.scores)[:0:-1]
        monkeypatch.setenv("QUIRE_ADDRESS", ranker[1].gateway.grpc_address)
        status, out, _ = command("rerank", "cat", "--top-n=2", stdin="\n".join(DOCUMENTS))
        found = [f"{each.relevance_score:.6f}\t{DOCUMENTS[each.index]}" for each in ranking.results]
        assert (status, out.splitlines()) == (0, found)
        assert command("rerank", "cat")[2] == "quire rerank: error: stdin holds no text\n"

    def embed() -> None:
        def failing() -> Iterator[list[str]]:
            yield texts[:3]
            raise KeyError("no fourth")

        with Client(embedder[1].gateway.grpc_address) as client:
            parts = [*client.embed_stream(iter([texts[:3], texts[3:]]), prompt_name="query", dimensions=7, timeout_s=9)]
            np.testing.assert_array_equal([vector for part in parts for vector in part.vectors], expected)
            answers = client.embed_stream(failing())
            assert len(next(answers).vectors) == 3
            with pytest.raises(KeyError, match="no fourth"):
                next(answers)
            with pytest.raises(InvalidArgument, match=r"texts\[0\] is \[-1\]"):
                next(client.embed_stream([[[-1]]]))
        monkeypatch.setenv("QUIRE_ADDRESS", embedder[1].gateway.grpc_address)
        flags = ("--prompt-name=query", "--dimensions=7")
        status, out, _ = command("embed", *flags, "--file=-", stdin="\n".join(texts))
        lines = list(map(json.loads, out.splitlines()))
        assert (status, [each["text"] for each in lines]) == (0, texts)
        np.testing.assert_array_equal(np.array([each["embedding"] for each in lines], np.float32), expected)
        assert command("embed", *flags, *texts[:3], f"--output={tmp_path}/a.npy") == (0, "", "")
        np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected[:3])
        status, _, err = command("embed", "--batch-size=2", *texts[:5], LONG)
        assert (status, err.split(" has")[0]) == (1, "quire embed: error: texts[5]")
        assert command("embed", "a", "--file=-")[2] == "quire embed: error: give texts or --file, not both\n"

    await asyncio.to_thread(rank)
    await asyncio.to_thread(embed)
