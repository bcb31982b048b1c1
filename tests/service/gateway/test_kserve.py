"""The Open Inference Protocol: what KServe's and Triton's clients send, and what they get."""

import asyncio
import json
import struct

import grpc
import pytest

from quire.gateway.v1 import generation_pb2
from quire.inference import open_inference_pb2 as pb

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
    return call(request, timeout=10)


def infer(gateway, request):
    return unary(gateway, "ModelInfer", request, pb.ModelInferResponse)


async def infer_stream(gateway, *requests):
    call = gateway.channel.stream_stream(
        SERVICE + "ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )
    return [response async for response in call(iter(requests), timeout=20)]


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


async def test_parameters_of_the_request_and_texts_for_numbers_count(gateway):
    request = make_request("hello", sampling={"max_tokens": "3"})
    request.parameters["temperature"].double_param = 0.5
    request.inputs.add(name="return_num_output_tokens", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.outputs.add(name="text_output")
    response = await infer(gateway, request)
    outputs = {output.name: output for output in response.outputs}
    assert list(outputs["num_output_tokens"].contents.uint_contents) == [3]


async def test_stream_answers_several_requests_and_an_error_ends_only_its_own(gateway):
    requests = [
        make_request("hello", stream=True, request_id="a", raw=True),
        make_request("hello", stream=True, request_id="bad", sampling={"temperature": -1}),
        make_request("good morning", stream=True, request_id="b"),
    ]
    responses = await asyncio.wait_for(infer_stream(gateway, *requests), 20)
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


async def test_metadata_and_readiness_tell_what_is_served(gateway):
    metadata = await unary(
        gateway, "ModelMetadata", pb.ModelMetadataRequest(name="quire-tiny"), pb.ModelMetadataResponse
    )
    assert "text_input" in [tensor.name for tensor in metadata.inputs]
    assert (await unary(gateway, "ServerLive", pb.ServerLiveRequest(), pb.ServerLiveResponse)).live
    assert (await unary(gateway, "ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready
    ready = [
        (await unary(gateway, "ModelReady", pb.ModelReadyRequest(name=name), pb.ModelReadyResponse)).ready
        for name in ("quire-tiny", "other")
    ]
    assert ready == [True, False]


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (lambda r: r.inputs.__delitem__(0), "INVALID_ARGUMENT", "text_input"),
        (lambda r: r.inputs[0].shape.append(2), "INVALID_ARGUMENT", "inputs[0].shape"),
        (lambda r: r.inputs[0].shape.__setitem__(0, 2), "INVALID_ARGUMENT", "1 came"),
        (lambda r: setattr(r.inputs[0], "datatype", "FP32"), "INVALID_ARGUMENT", "BYTES"),
        (lambda r: setattr(r.inputs[0], "name", "other"), "INVALID_ARGUMENT", "other"),
        (lambda r: r.raw_input_contents.append(b"\x05"), "INVALID_ARGUMENT", "raw_input_contents"),
        (lambda r: r.raw_input_contents.extend([b"\x05", b"\x01", b""]), "INVALID_ARGUMENT", "inputs[0]"),
        (lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff"), "INVALID_ARGUMENT", "UTF-8"),
        (lambda r: r.inputs[2].contents.bytes_contents.__setitem__(0, b"[]"), "INVALID_ARGUMENT", "JSON object"),
        (lambda r: r.parameters["no_such"].MergeFromString(b"\x10\x01"), "INVALID_ARGUMENT", "no_such"),
        (lambda r: setattr(r, "model_name", "other"), "NOT_FOUND", "other"),
        (lambda r: setattr(r, "model_version", "7"), "NOT_FOUND", "7"),
        (lambda r: r.outputs.add(name="other"), "INVALID_ARGUMENT", "other"),
    ],
)
async def test_bad_requests_name_what_is_at_fault(gateway, change, code, words):
    request = make_request("hello")
    change(request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await infer(gateway, request)
    assert refused.value.code().name == code
    assert words in (refused.value.details() or "")


async def test_leaving_a_stream_ends_its_requests(gateway):
    call = gateway.channel.stream_stream(
        SERVICE + "ModelStreamInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelStreamInferResponse.FromString,
    )()
    await call.write(make_request("hello", stream=True, sampling={"max_tokens": 500, "ignore_eos": True}))
    await call.read()
    call.cancel()
    async with asyncio.timeout(10):
        await gateway.gateway._ledger.wait_until_empty()


async def test_a_damaged_message_ends_the_stream_as_invalid(gateway):
    call = gateway.channel.stream_stream(SERVICE + "ModelStreamInfer")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call(iter([b"\xff\xff"]), timeout=10):
            pass
    assert refused.value.code().name == "INVALID_ARGUMENT"
