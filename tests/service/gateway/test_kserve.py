"""The Open Inference Protocol: what KServe's and Triton's clients send, and what they get."""

import asyncio
import json
import struct

import grpc
import pytest

from quire.gateway.v1 import generation_pb2
from quire.inference import open_inference_pb2 as pb
from tests.support.fake_scheduler import counting_rule

SERVICE = "/inference.GRPCInferenceService/"


def make_request(*prompts, raw=False, request_id="mine", stream=None, sampling=None, model="quire-tiny"):
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    inputs = [("text_input", "BYTES", [prompt.encode() for prompt in prompts])]
    if stream is not None:
        inputs.append(("stream", "BOOL", [stream]))
    else:
        inputs.append(("exclude_input_in_output", "BOOL", [True]))
    inputs.append(("sampling_parameters", "BYTES", [json.dumps(sampling or {"max_tokens": 8}).encode()]))
    for name, datatype, values in inputs:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[len(values)])
        if raw:
            elements = (struct.pack("<I", len(v)) + v if isinstance(v, bytes) else bytes([v]) for v in values)
            request.raw_input_contents.append(b"".join(elements))
        elif datatype == "BYTES":
            tensor.contents.bytes_contents.extend(values)
        else:
            tensor.contents.bool_contents.extend(values)
    return request


def unary(gateway, name, request, response_class):
    call = gateway.channel.unary_unary(
        SERVICE + name,
        request_serializer=type(request).SerializeToString,
        response_deserializer=response_class.FromString,
    )
    return call(request, timeout=30)


def infer(gateway, request):
    return unary(gateway, "ModelInfer", request, pb.ModelInferResponse)


def stream_call(gateway):
    return gateway.channel.stream_stream(
        SERVICE + "ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )


async def infer_stream(gateway, *requests):
    async with asyncio.timeout(60):
        return [response async for response in stream_call(gateway)(iter(requests))]


@pytest.fixture
def gateway(rig):
    rig.scheduler.rule = counting_rule
    return rig.gateway


async def expected_text(gateway, prompt):
    request = generation_pb2.GenerateRequest(text=prompt)
    request.stopping.max_tokens = 8
    return (await gateway.generation.Generate(request)).sequences[0].text


@pytest.mark.parametrize("raw", [False, True])
async def test_infer_answers_every_prompt_in_the_form_of_the_request(gateway, raw):
    texts = [(await expected_text(gateway, prompt)).encode() for prompt in ("hello", "good morning")]
    response = await infer(gateway, make_request("hello", "good morning", raw=raw))
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape), response.id) == ("text_output", "BYTES", [2], "mine")
    if raw:
        assert response.raw_output_contents == [b"".join(struct.pack("<I", len(text)) + text for text in texts)]
    else:
        assert list(output.contents.bytes_contents) == texts


async def test_stream_answers_several_requests_and_an_error_ends_only_its_own(gateway):
    requests = [
        make_request("hello", stream=True, request_id="a", raw=True),
        make_request("hello", stream=True, request_id="bad", sampling={"temperature": -1}),
        make_request("good morning", stream=True, request_id="b"),
    ]
    responses = await infer_stream(gateway, *requests)
    errors = [each for each in responses if each.error_message]
    assert [each.infer_response.id for each in errors] == ["bad"]
    assert "temperature" in errors[0].error_message
    for request_id, prompt in (("a", "hello"), ("b", "good morning")):
        mine = [each.infer_response for each in responses if each.infer_response.id == request_id]
        finals = [each.parameters["triton_final_response"].bool_param for each in mine]
        assert finals == [False] * (len(mine) - 1) + [True]
        raw = [each.raw_output_contents[0][4:] if each.raw_output_contents else b"" for each in mine]
        typed = [b"".join(each.outputs[0].contents.bytes_contents) for each in mine]
        assert b"".join(raw + typed).decode() == await expected_text(gateway, prompt)


@pytest.mark.parametrize("raw", [False, True])
async def test_the_cumulative_log_probability_is_a_float(gateway, raw):
    request = make_request("hello", "good morning", raw=raw)
    request.outputs.add(name="cumulative_logprob")
    response = await infer(gateway, request)
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("cumulative_logprob", "FP32", [2])
    if raw:
        assert response.raw_output_contents == [struct.pack("<ff", -4.0, -4.0)]
    else:
        assert list(output.contents.fp32_contents) == [-4.0, -4.0]


async def test_repository_index_lists_the_model_and_its_state(gateway, monkeypatch):
    for request in (pb.RepositoryIndexRequest(), pb.RepositoryIndexRequest(ready=True)):
        (model,) = (await unary(gateway, "RepositoryIndex", request, pb.RepositoryIndexResponse)).models
        assert (model.name, model.version, model.state, model.reason) == ("quire-tiny", "1", "READY", "")
    monkeypatch.setattr(gateway.gateway._generator, "is_draining", True)
    (model,) = (await unary(gateway, "RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)).models
    assert (model.state, model.reason) == ("UNAVAILABLE", "no request would run at once")
    ready = await unary(gateway, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True), pb.RepositoryIndexResponse)
    assert not ready.models


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("CudaSharedMemoryRegister", "in the messages"),
        ("NoSuchMethod", "ModelStreamInfer"),
    ],
)
async def test_a_method_that_is_not_served_is_refused_with_a_way_out(gateway, method, words):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await unary(gateway, method, pb.ServerLiveRequest(), pb.ServerLiveResponse)
    assert refused.value.code().name == "UNIMPLEMENTED"
    assert f"{method} is not served here" in (refused.value.details() or "")
    assert words in (refused.value.details() or "")


async def test_repository_index_knows_no_repository_by_a_name(gateway):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await unary(
            gateway, "RepositoryIndex", pb.RepositoryIndexRequest(repository_name="mine"), pb.RepositoryIndexResponse
        )
    assert refused.value.code().name == "NOT_FOUND"
    assert 'repository_name is "mine"' in (refused.value.details() or "")
