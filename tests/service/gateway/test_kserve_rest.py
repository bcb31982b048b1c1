"""The Open Inference Protocol over HTTP: the same as over gRPC, with tensors as JSON."""

import gzip
import json
import struct
from typing import Any

import pytest

from tests.service.gateway.test_kserve import infer as infer_over_grpc
from tests.service.gateway.test_kserve import make_request
from tests.support.fake_scheduler import counting_rule
from tests.support.gateway_process import running_gateway
from tests.support.raw_http import connection_to, request

MODEL = "/v2/models/quire-tiny"


@pytest.fixture
def gateway(rig):
    rig.scheduler.rule = counting_rule
    return rig.gateway


@pytest.fixture
def client(rig):
    return rig.http


def text_input(*texts, **fields) -> Any:
    return {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": list(texts)} | fields


def flag(name, value: Any = True) -> Any:
    return {"name": name, "datatype": "BOOL", "shape": [1], "data": [value]}


async def infer(client, *inputs: Any, path=f"{MODEL}/infer", **fields):
    return await client.post(path, json={"inputs": list(inputs)} | fields)


async def test_the_server_and_its_model_are_live_and_ready(client):
    for path, answer in (
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True}),
        (f"{MODEL}/ready", {"name": "quire-tiny", "ready": True}),
        (f"{MODEL}/versions/1/ready", {"name": "quire-tiny", "ready": True}),
    ):
        response = await client.get(path)
        assert (response.status_code, response.json()) == (200, answer)
    assert (await client.get("/v2")).json()["name"] == "quire"


async def test_without_a_scheduler_it_is_live_and_not_ready():
    async with running_gateway(schedulers=("127.0.0.1:1",)) as gateway:
        assert (await gateway.http.get("/v2/health/live")).status_code == 200
        for path in ("/v2/health/ready", f"{MODEL}/ready"):
            response = await gateway.http.get(path)
            assert (response.status_code, response.json()["ready"]) == (503, False)


async def test_an_inference_is_what_it_is_over_grpc(gateway, client):
    over_grpc = await infer_over_grpc(gateway, make_request("hello", "good bye"))
    response = await infer(
        client,
        text_input("hello", "good bye"),
        flag("exclude_input_in_output"),
        parameters={"max_tokens": 8},
        id="mine",
        outputs=[{"name": "text_output"}],
    )
    answer = response.json()
    texts = [text.decode() for text in over_grpc.outputs[0].contents.bytes_contents]
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("mine", "quire-tiny", "1")
    assert answer["outputs"] == [{"name": "text_output", "datatype": "BYTES", "shape": [2], "data": texts}]


async def test_every_kind_of_output_is_a_list_of_json(client):
    flags = [
        flag(f"return_{name}")
        for name in ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    ]
    response = await infer(client, text_input("hello"), *flags, parameters={"max_tokens": 2})
    outputs = {output["name"]: output["data"] for output in response.json()["outputs"]}
    assert outputs["finish_reason"] == ["length"]
    assert outputs["cumulative_logprob"] == [-1.0]
    assert outputs["num_output_tokens"] == [2]
    assert len(outputs) == 6


async def test_what_clients_add_to_a_request_is_fine(client):
    """KServe's client names the model in the body; Triton's client permits binary outputs but also reads JSON."""
    nested = text_input(["hello"], shape=[1, 1], parameters={"binary_data_size": 9})
    for inputs, fields in (
        ([nested], {}),
        ([text_input("hello")], {"model_name": "quire-tiny", "model_version": "1", "id": None, "outputs": None}),
        ([text_input("hello")], {"parameters": {"binary_data_output": True, "max_tokens": 2}}),
        ([text_input("hello")], {"outputs": [{"name": "text_output", "parameters": {"binary_data": True}}]}),
    ):
        asked: dict[str, Any] = fields
        response = await infer(client, *inputs, **asked)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (f"{MODEL}/versions/2/infer", {"inputs": [text_input("a")]}, 404, 'model_version is "2"'),
        (f"{MODEL}/infer", {}, 400, "inputs is missing"),
        (f"{MODEL}/infer", {"inputs": [text_input("a")], "model_name": "b"}, 400, 'model_name is "b"; the path has'),
        (f"{MODEL}/infer", {"inputs": [text_input("a")], "parameters": {"suffix": "b"}}, 400, 'parameters["suffix"]'),
        (f"{MODEL}/infer", {"inputs": [text_input(True)]}, 400, "inputs[0].data[0] must be a string"),
        (f"{MODEL}/infer", {"inputs": [text_input("a"), flag("stream", "x")]}, 400, "inputs[1].data[0] must be true"),
        (f"{MODEL}/infer", {"inputs": [text_input("a"), flag("stream")]}, 400, "use ModelStreamInfer"),
        (f"{MODEL}/infer", {"inputs": [text_input("a")], "parameters": {"n": 2**64}}, 400, 'parameters["n"]'),
        (
            f"{MODEL}/infer",
            {"inputs": [text_input("a")], "parameters": {"n": [1]}},
            400,
            "parameters must be an object",
        ),
        (f"{MODEL}/infer", {"inputs": [text_input("a")], "parameters": {"n": 999}}, 400, 'parameters["n"] is 999'),
        (f"{MODEL}/infer", [], 400, "must be a JSON object"),
        # tritonclient cannot print an error that is an object.
        ("/v2/repository/models/quire-tiny/load", None, 404, "is not known here"),
        ("/v2/systemsharedmemory/status", None, 404, "is not known here"),
    ],
)
async def test_an_error_is_the_protocol_s_and_names_the_field(client, path, body, status, says):
    response = await client.post(path, json=body)
    assert response.status_code == status
    assert set(response.json()) == {"error"}
    assert says in response.json()["error"]


def binary_body(size: int | None = None, **fields) -> tuple[bytes, dict[str, str]]:
    """A body with one prompt as bytes after its JSON, and its headers. `size` replaces its real size."""
    data = struct.pack("<I", 5) + b"hello"
    prompt: dict[str, Any] = {"name": "text_input", "datatype": "BYTES", "shape": [1]}
    prompt["parameters"] = {"binary_data_size": len(data) if size is None else size}
    head = json.dumps({"inputs": [prompt], "parameters": {"max_tokens": 2}} | fields).encode()
    headers = {"inference-header-content-length": str(len(head)), "content-type": "application/octet-stream"}
    return head + data, headers


@pytest.mark.parametrize("packed", [False, True])
async def test_tensors_are_bytes_in_both_directions_where_the_client_says_so(client, packed):
    plain = await infer(client, text_input("hello"), parameters={"max_tokens": 2})
    body, headers = binary_body(outputs=[{"name": "text_output", "parameters": {"binary_data": True}}])
    if packed:
        body, headers = gzip.compress(body), headers | {"content-encoding": "gzip"}
    response = await client.post(f"{MODEL}/infer", content=body, headers=headers)
    assert response.status_code == 200, response.text
    size = int(response.headers["inference-header-content-length"])
    text = plain.json()["outputs"][0]["data"][0].encode()
    assert response.content[size:] == struct.pack("<I", len(text)) + text
    (output,) = json.loads(response.content[:size])["outputs"]
    assert output["parameters"] == {"binary_data_size": len(text) + 4}


@pytest.mark.parametrize(
    ("body", "headers", "says"),
    [
        (*binary_body(size=99), "binary_data_size 99"),
        (*binary_body(size=4), "bytes that are not a sequence"),
        (binary_body()[0] + b"x", binary_body()[1], "do not use 1 bytes"),
        (b"{}", {"inference-header-content-length": "3"}, "must be the bytes of JSON"),
        (b"{}", {"inference-header-content-length": "-1"}, "must be the bytes of JSON"),
    ],
)
async def test_bytes_that_do_not_fit_their_json_are_refused(client, body, headers, says):
    headers = {"content-type": "application/octet-stream"} | headers
    response = await client.post(f"{MODEL}/infer", content=body, headers=headers)
    assert response.status_code == 400
    assert says in response.json()["error"]


async def test_the_generate_extension_answers_whole_and_in_pieces(client):
    asked = {"text_input": "hello", "max_tokens": 3, "return_num_output_tokens": True, "unknown": 1}
    whole = await client.post(f"{MODEL}/generate", json=asked)
    assert whole.headers["x-quire-ignored-fields"] == "unknown"
    assert whole.json()["num_output_tokens"] == 3
    stream = await client.post(f"{MODEL}/generate_stream", json=asked)
    pieces = [json.loads(line.removeprefix("data: ")) for line in stream.text.splitlines() if line]
    assert "".join(piece["text_output"] for piece in pieces) == whole.json()["text_output"]
    # As in the documents of Triton's back ends for vLLM and TensorRT-LLM.
    fields = {"stream": False, "max_tokens": 3, "return_num_output_tokens": True}
    for more in ({"parameters": fields}, {"max_tokens": 3, "bad_words": "", "stop_words": ""}):
        again = await client.post(f"{MODEL}/generate", json={"text_input": "hello"} | more)
        assert again.json()["text_output"] == whole.json()["text_output"]
    refused = await client.post(f"{MODEL}/generate", json={"text_input": "hello", "max_tokens": [3]})
    assert (refused.status_code, set(refused.json())) == (400, {"error"})


async def test_what_tritonclient_asks_before_it_infers_is_answered_over_http(client):
    assert (await client.get(f"{MODEL}/config")).json()["backend"] == "quire"
    for path in ("/v2/models/stats", f"{MODEL}/stats"):
        assert (await client.get(path)).json()["model_stats"][0]["name"] == "quire-tiny"
    index = await client.post("/v2/repository/index", headers={"content-type": "application/json"})
    assert index.json() == [{"name": "quire-tiny", "version": "1", "state": "READY"}]


async def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault_in_the_log(gateway, client, caplog):
    connection = await connection_to(gateway)
    connection.sendall(request(f"POST {MODEL}/infer", {"content-length": "100", "content-type": "application/json"}))
    connection.sendall(b"{")
    # When the gateway answers another request, it waits for more of this one.
    await client.get("/health")
    connection.close()
    for _ in range(3):
        await client.get("/health")
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("path", ["/v2/models/other", "/v2/models/other/ready", f"{MODEL}/versions/2"])
async def test_another_model_is_not_found(client, path):
    response = await client.get(path)
    assert (response.status_code, set(response.json())) == (404, {"error"})
