"""One server with a chat model, an encoder and a ranker: every door finds the model that a call names."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.auth.caller import Access
from quire.client import AsyncClient, GenerationOptions
from quire.rpc.errors import InvalidArgument, NotFound, Unimplemented
from quire.service.model_flag import ModelFlag
from tests.support.embedding_models import make_embedding_model, make_ranking_model
from tests.support.keys import KeysFile
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

CHAT, ENCODER, RANKER = "quire-tiny", "vectors", "ranks"
ASKED = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
PARIS = "The capital of France is Paris."
STORY = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
OPERATOR = Access(max_priority=100, may_pin=True, is_operator=True)


@dataclass(frozen=True, slots=True)
class Doors:
    """A server, its HTTP and gRPC clients with a key of an operator, and a client with a key of the encoder only."""

    served: Served
    http: httpx.AsyncClient
    grpc: AsyncClient
    bound: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> Any:
        """The answer to a call that succeeds."""
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_embedding_model(root / "encoder")
    make_ranking_model(root / "ranks")
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def doors(directories: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Doors]:
    work = tmp_path_factory.mktemp("served")
    keys = KeysFile(work / "keys.json")
    operator = keys.add("ours", access=OPERATOR)
    bound = keys.add("theirs", access=Access(models=frozenset({ENCODER})))
    # By the texts of a command line: that is where flags of one model are read.
    models = tuple(
        map(
            ModelFlag.parse,
            (
                "quire-tiny,num-gpu-blocks=512",
                f"{ENCODER}={directories / 'encoder'},max-num-seqs=64",
                str(directories / RANKER),
            ),
        )
    )
    settings = {"keys_files": (keys.path,), "dtype": "float32", "batch_dir": work / "batches"}
    async with serving(models=models, vllm_metric_names=True, **settings) as served:
        url = f"http://{served.server.http_address}"
        async with (
            httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {operator}"}, timeout=120) as http,
            httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {bound}"}, timeout=60) as theirs,
            AsyncClient(served.server.grpc_address, api_key=operator) as grpc,
        ):
            yield Doors(served, http, grpc, theirs)


async def test_each_http_call_goes_to_the_model_that_it_names_or_to_the_one_of_its_kind(doors: Doors) -> None:
    for named in ({"model": CHAT}, {}):
        chat = await doors.post("/v1/chat/completions", **named, **ASKED)
        assert (chat["model"], chat["choices"][0]["message"]["content"]) == (CHAT, PARIS)
        response = await doors.post("/v1/responses", **named, input="What is the capital of France?", temperature=0)
        assert (response["model"], response["output"][0]["content"][0]["text"]) == (CHAT, PARIS)
        message = await doors.post("/v1/messages", **named, max_tokens=40, **ASKED)
        assert (message["model"], message["content"][0]["text"]) == (CHAT, PARIS)
    for named in ({"model": ENCODER}, {}):
        vectors = await doors.post("/v1/embeddings", **named, input=["the cat", "a dog"])
        assert (vectors["model"], [len(each["embedding"]) for each in vectors["data"]]) == (ENCODER, [48, 48])
    for named in ({"model": RANKER}, {}):
        ranked = await doors.post("/v1/rerank", **named, query="the cat", documents=["a dog", "the cat sat"])
        assert (ranked["model"], len(ranked["results"])) == (RANKER, 2)
    for model, num_tokens in ((CHAT, 4), (ENCODER, 4)):
        tokens = await doors.post("/tokenize", model=model, prompt="the cat")
        assert tokens["count"] == num_tokens
        ids = tokens["tokens"]
        assert "the cat" in (await doors.post("/detokenize", model=model, tokens=ids))["prompt"]
    count = await doors.post("/v1/messages/count_tokens", model=CHAT, messages=ASKED["messages"])
    assert count["input_tokens"] == 11


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {"model": ENCODER, **ASKED}, f'"{CHAT}" generates text'),
        ("/v1/completions", {"model": RANKER, "prompt": "a"}, f'"{CHAT}" generates text'),
        ("/v1/messages", {"model": ENCODER, "max_tokens": 3, **ASKED}, f'"{CHAT}" generates text'),
        ("/v1/responses", {"model": ENCODER, "input": "a"}, f'"{CHAT}" generates text'),
        ("/v1/embeddings", {"model": CHAT, "input": "a"}, f'"{ENCODER}" gives embeddings'),
        ("/v1/score", {"model": ENCODER, "text_1": "a", "text_2": "a"}, f'"{RANKER}" ranks documents'),
        ("/v2/models/vectors/generate", {"text_input": "a"}, f'"{CHAT}" generates text'),
    ],
)
async def test_a_model_of_another_kind_is_refused_with_the_name_of_one_that_does_it(
    doors: Doors, path: str, body: dict[str, Any], kind: str
) -> None:
    refused = await doors.http.post(path, json=body)
    assert refused.is_client_error or refused.status_code == 501
    assert kind in str(refused.json()["error"])


async def test_an_unknown_model_is_refused_with_the_names_of_all(doors: Doors) -> None:
    known = f'"{CHAT}", "{ENCODER}", "{RANKER}"'
    tokens = {"prompt": "a"}
    for path, body in (("/v1/chat/completions", ASKED), ("/v1/embeddings", {"input": "a"}), ("/tokenize", tokens)):
        refused = await doors.http.post(path, json=body | {"model": "other"})
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert f'is "other"; the models served here are {known}' in error["message"]
    assert (await doors.http.get("/v1/models/other")).status_code == 404
    assert (await doors.http.get("/v2/models/other/ready")).status_code == 404
    with pytest.raises(InvalidArgument, match="the models served here"):
        await doors.grpc.generate("a", model="other")


async def test_lists_and_descriptions_have_every_model(doors: Doors) -> None:
    listed = (await doors.http.get("/v1/models")).json()["data"]
    assert [(each["id"], each["max_model_len"]) for each in listed] == [(CHAT, 1024), (ENCODER, 32), (RANKER, 62)]
    assert (await doors.http.get(f"/v1/models/{ENCODER}")).json()["root"] == ENCODER
    assert [each.name for each in await doors.grpc.list_models()] == [CHAT, ENCODER, RANKER]
    assert (await doors.grpc.get_model(RANKER)).architecture == "BertForSequenceClassification"
    assert [each.model for each in (await doors.grpc.server_info()).replicas] == [CHAT, ENCODER, RANKER]
    index = (await doors.http.post("/v2/repository/index", json={})).json()
    assert [(each["name"], each["state"]) for each in index] == [(each, "READY") for each in (CHAT, ENCODER, RANKER)]
    assert (await doors.http.get(f"/v2/models/{ENCODER}/ready")).json()["ready"]
    assert [each["model"] for each in (await doors.http.get("/server_info")).json()["replicas"]][1] == ENCODER
    with pytest.raises(NotFound, match="the models served here"):
        await doors.grpc.get_model("other")


async def test_grpc_finds_models_requests_and_pins(doors: Doors) -> None:
    greedy = GenerationOptions(max_tokens=8, temperature=0)
    whole = await doors.grpc.generate("Once upon a time", greedy, model=CHAT)
    assert (whole.model, (await doors.grpc.generate("Once upon a time", greedy)).text) == (CHAT, whole.text)
    with pytest.raises(Unimplemented, match=f'model "{ENCODER}" gives embeddings; "{CHAT}" generates text'):
        await doors.grpc.generate("a", greedy, model=ENCODER)
    pinned = await doors.grpc.pin_prefix("Once upon a time there was a small dog. " * 4, model=CHAT)
    await doors.grpc.unpin_prefix(pinned.pin_id)
    with pytest.raises(NotFound):
        await doors.grpc.unpin_prefix(pinned.pin_id)
    long = GenerationOptions(max_tokens=900, ignore_eos=True)
    async with doors.grpc.generate_stream("Once", long, model=CHAT, request_id="mine") as stream:
        await anext(aiter(stream))
        await doors.grpc.cancel("mine")
    with pytest.raises(NotFound):
        await doors.grpc.cancel("mine")


async def test_each_line_of_a_batch_names_its_model(doors: Doors) -> None:
    def line(number: int, model: str) -> bytes:
        body = {"model": model, "input": ["the cat"]}
        asked = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/embeddings", "body": body}
        return json.dumps(asked).encode() + b"\n"

    async def run(*lines: bytes) -> Any:
        files = {"file": ("b.jsonl", b"".join(lines))}
        sent = (await doors.http.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
        batch = await doors.post(
            "/v1/batches", input_file_id=sent["id"], endpoint="/v1/embeddings", completion_window="24h"
        )

        async def ended() -> bool:
            return (await doors.http.get(f"/v1/batches/{batch['id']}")).json()["status"] in ("completed", "failed")

        await until(ended)
        return (await doors.http.get(f"/v1/batches/{batch['id']}")).json()

    done = await run(line(0, ENCODER), line(1, CHAT))
    assert (done["request_counts"]["completed"], done["request_counts"]["failed"]) == (1, 1)
    failed = await run(line(0, "other"))
    assert "the models served here are" in failed["errors"]["data"][0]["message"]


async def test_a_key_of_one_model_sees_only_that(doors: Doors) -> None:
    assert [each["id"] for each in (await doors.bound.get("/v1/models")).json()["data"]] == [ENCODER]
    assert (await doors.bound.post("/v1/embeddings", json={"input": "a"})).status_code == 200
    refused = (await doors.bound.post("/v1/chat/completions", json={"model": CHAT, **ASKED})).json()["error"]
    assert (refused["code"], "the models served here are" in refused["message"]) == ("model_not_found", True)
    assert CHAT not in refused["message"].partition(";")[2]
    unnamed = (await doors.bound.post("/v1/chat/completions", json=ASKED)).json()["error"]
    assert (unnamed["code"], CHAT in unnamed["message"]) == ("wrong_kind_of_model", False)
    assert (await doors.bound.get(f"/v1/models/{CHAT}")).status_code == 404


async def test_metrics_have_the_model(doors: Doors) -> None:
    text = (await doors.http.get("/metrics")).text
    lines = text.splitlines()
    for model in (CHAT, ENCODER, RANKER):
        assert f'quire_gateway_connected_schedulers{{model="{model}"}} 1.0' in lines
        assert any(each.startswith(f'vllm:num_requests_running{{engine="0",model_name="{model}"}}') for each in lines)
    types = [each for each in lines if each.startswith("# TYPE")]
    assert len(types) == len(set(types))
    series = [each.rpartition(" ")[0] for each in lines if not each.startswith("#")]
    assert len(series) == len(set(series))


async def story(http: httpx.AsyncClient) -> str:
    text = ""
    async with http.stream("POST", "/v1/completions", json={"model": CHAT, **STORY}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    return text


async def killed_under(doors: Doors, process: str, calls: Sequence[Any]) -> list[Any]:
    """The answers to calls during which a process is killed and comes back."""
    running = [asyncio.create_task(each) for each in calls]
    await asyncio.sleep(0.3)
    await doors.served.kill(process)
    return await asyncio.gather(*running)


async def test_a_killed_worker_or_scheduler_of_one_model_leaves_the_others_alone(doors: Doors) -> None:
    expected = await story(doors.http)
    texts = ["the cat sat on the mat", "a dog ran"]
    vectors = (await doors.post("/v1/embeddings", model=ENCODER, input=texts))["data"]
    started = doors.served.server.services
    for victim in (f"worker-{ENCODER}", f"scheduler-{ENCODER}"):
        stories = await killed_under(doors, victim, [story(doors.http) for _ in range(4)])
        assert stories == [expected] * 4
        # The killed model answers again; its requests wait for it.
        assert (await doors.post("/v1/embeddings", model=ENCODER, input=texts))["data"] == vectors
    left = doors.served.server.services
    assert {name for name, pid in left.items() if pid != started[name]} == {f"worker-{ENCODER}", f"scheduler-{ENCODER}"}
    asked = [doors.post("/v1/embeddings", model=ENCODER, input=texts) for _ in range(16)]
    first, *answers = await killed_under(doors, "worker", [story(doors.http), *asked])
    assert first == expected
    assert all(each["data"] == vectors for each in answers)
    assert doors.served.server.services == left | {"worker": doors.served.server.services["worker"]}


@pytest.mark.long
async def test_sleep_of_one_model_leaves_the_others_awake(doors: Doors) -> None:
    assert (await doors.http.post(f"/sleep?level=2&model={ENCODER}")).json() == {"is_sleeping": True}
    assert (await doors.http.get("/is_sleeping")).json() == {"is_sleeping": False}
    assert (await doors.http.get("/health")).status_code == 200
    assert not (await doors.http.get(f"/v2/models/{ENCODER}/ready")).json()["ready"]
    waiting = asyncio.create_task(doors.post("/v1/embeddings", model=ENCODER, input="a"))
    assert (await doors.post("/v1/chat/completions", model=CHAT, **ASKED))["choices"]
    assert not waiting.done()
    assert (await doors.http.post(f"/wake_up?model={ENCODER}")).json() == {"is_sleeping": False}
    assert len((await waiting)["data"]) == 1
    assert (await doors.http.post("/sleep?model=other")).status_code == 404


async def test_an_idle_model_unloads_and_comes_back_for_the_next_request(directories: Path) -> None:
    encoder = ModelFlag(None, str(directories / "encoder"), (("idle-unload", "0.3"),))
    models = (ModelFlag.parse("quire-tiny,num-gpu-blocks=64"), encoder)
    async with (
        serving(models=models, dtype="float32") as served,
        httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60) as http,
    ):

        async def sleeps() -> bool:
            return (await http.get("/is_sleeping?model=encoder")).json()["is_sleeping"]

        for _ in range(2):
            await until(sleeps)
            assert not (await http.get("/is_sleeping?model=quire-tiny")).json()["is_sleeping"]
            # It is ready: the request wakes it, and several that come together wait for it.
            assert (await http.get("/v2/models/encoder/ready")).json()["ready"]
            bodies = [{"model": "encoder", "input": [text]} for text in ("the cat", "a dog", "the cat")]
            found = await asyncio.gather(*(http.post("/v1/embeddings", json=each) for each in bodies))
            assert [each.status_code for each in found] == [200] * 3
            assert found[0].json()["data"] == found[2].json()["data"]
        await until(sleeps)
        # An operator's sleep lasts until the operator ends it.
        assert (await http.post("/sleep?level=2&model=encoder")).status_code == 200
        assert not (await http.get("/v2/models/encoder/ready")).json()["ready"]
        waiting = asyncio.create_task(http.post("/v1/embeddings", json={"model": "encoder", "input": "a"}))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        assert (await http.post("/wake_up?model=encoder")).json() == {"is_sleeping": False}
        assert (await waiting).status_code == 200
