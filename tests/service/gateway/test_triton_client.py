"""Triton's own Python client against the gateway: its calls work, and errors reach its users as errors."""

import asyncio
import time

import pytest
import pytest_asyncio

from quire.gateway.v1 import generation_pb2
from tests.support.fake_scheduler import FakeScheduler, counting_rule
from tests.support.fronts import GrpcGenerate
from tests.support.gateway_process import RunningGateway
from tests.support.rig import Rig
from tests.support.triton_client import TritonClient, TritonError, triton_client

MODEL = "quire-tiny"
INPUTS = {"text_input": ["hello"], "exclude_input_in_output": [True]}
EIGHT = {"max_tokens": 8}
pytestmark = pytest.mark.usefixtures("scheduler")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(shared_rig: Rig):
    async with triton_client(shared_rig.gateway.gateway.grpc_address) as running:
        yield running


@pytest.fixture
def scheduler(rig: Rig) -> FakeScheduler:
    rig.scheduler.rule = counting_rule
    return rig.scheduler


@pytest.fixture
def gateway(rig: Rig, scheduler: FakeScheduler) -> RunningGateway:
    return rig.gateway


def streamed(prompt: str, request_id: str, **parameters) -> dict:
    return {
        "inputs": {"text_input": [prompt], "stream": [True]},
        "request_id": request_id,
        "parameters": EIGHT | parameters,
    }


@pytest.mark.parametrize("empty_final", [False, True])
async def test_stream_pieces_are_the_text_and_the_last_is_marked_final(gateway, client: TritonClient, empty_final):
    pieces = await client.stream(streamed("hello", "mine"), empty_final=empty_final)
    assert (
        "".join(piece["outputs"]["text_output"][0] for piece in pieces)
        == (await GrpcGenerate(gateway).ask(max_tokens=8)).text
    )
    assert len(pieces) > 2
    assert {piece["id"] for piece in pieces} == {"mine"}
    finals = [piece["parameters"]["triton_final_response"] for piece in pieces]
    assert finals == [False] * (len(pieces) - 1) + [True]


async def test_the_configuration_is_the_model_s_in_triton_s_terms(client: TritonClient):
    config = (await client.simple("get_model_config", model_name=MODEL, as_json=True))["config"]
    metadata = await client.simple("get_model_metadata", model_name=MODEL, as_json=True)
    assert (config["name"], config["platform"], config["backend"]) == (MODEL, "quire", "quire")
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["version_policy"] == {"specific": {"versions": ["1"]}}
    for kind in ("input", "output"):
        assert [each["name"] for each in config[kind]] == [each["name"] for each in metadata[f"{kind}s"]]
        datatypes = [each["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES") for each in config[kind]]
        assert datatypes == [each["datatype"] for each in metadata[f"{kind}s"]]
    assert [each["name"] for each in config["input"] if not each.get("optional")] == ["text_input"]


async def statistics_of(client: TritonClient, **asked) -> dict:
    (statistics,) = (await client.simple("get_inference_statistics", as_json=True, **asked))["model_stats"]
    return statistics


def counts_of(statistics: dict) -> dict[str, int]:
    return {name: int(each.get("count", 0)) for name, each in statistics["inference_stats"].items()}


async def test_statistics_count_requests_and_their_time_by_how_they_ended(gateway, scheduler, client: TritonClient):
    # A call whose deadline passes before it reaches the scheduler may not be counted.
    for timeout_s in (0.1, 1, 10):
        with scheduler.standing_still():
            num_submits = len(scheduler.submits)
            before = await statistics_of(client)
            parameters = {"max_tokens": 900, "ignore_eos": True}
            with pytest.raises(TritonError):
                await client.infer(INPUTS, parameters=parameters, timeout_s=timeout_s)
            async with asyncio.timeout(30):
                await gateway.gateway._models.default.ledger.wait_until_empty()
        if len(scheduler.submits) > num_submits:
            break
    started_ms = time.time() * 1000
    await client.infer(INPUTS | {"text_input": ["hello", "good morning"]}, parameters=EIGHT)
    await gateway.generation.Generate(generation_pb2.GenerateRequest(text="over quire's own service"))
    with pytest.raises(TritonError):
        await client.infer(INPUTS, parameters={"temperature": -1.0})
    after = await statistics_of(client, model_name=MODEL, model_version="1")
    assert int(after["inference_count"]) - int(before.get("inference_count", 0)) == 3
    assert int(after["last_inference"]) >= int(started_ms)
    grown = {name: count - counts_of(before)[name] for name, count in counts_of(after).items()}
    assert grown == {"success": 3, "fail": 1, "queue": 3, "compute_infer": 3}
    assert int(after["inference_stats"]["success"]["ns"]) > 0
    assert int(after["inference_stats"]["fail"]["ns"]) > 0


@pytest.mark.parametrize("method", ["get_model_config", "get_inference_statistics"])
@pytest.mark.parametrize("asked", [{"model_name": "other"}, {"model_name": MODEL, "model_version": "7"}])
async def test_what_is_asked_of_another_model_is_not_found(client: TritonClient, method, asked):
    with pytest.raises(TritonError) as refused:
        await client.simple(method, **asked)
    assert refused.value.status == "StatusCode.NOT_FOUND"


async def test_a_request_without_stream_gets_one_final_response_in_a_stream(gateway, client: TritonClient):
    (response,) = await client.stream({"inputs": INPUTS, "parameters": EIGHT, "request_id": "whole"})
    assert response["outputs"] == {"text_output": [(await GrpcGenerate(gateway).ask(max_tokens=8)).text]}
    assert response["parameters"] == {"triton_final_response": True}
