"""The Open Inference Protocol: requests of KServe's and Triton's clients, and their answers."""

import asyncio
import json
import struct

import grpc
import pytest

from gateway.api.kserve.inference import read_inputs
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, QuireError, from_rpc_error
from tests.support.fake_scheduler import counting_rule
from tests.support.fronts import GrpcGenerate
from tests.support.gateway_process import running_gateway
from tests.support.parameters import row_sampling

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
    return (await GrpcGenerate(gateway).ask(prompt, max_tokens=8)).text


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
    monkeypatch.setattr(gateway.gateway._models.default, "is_draining", True)
    (model,) = (await unary(gateway, "RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse)).models
    assert (model.state, model.reason) == ("UNAVAILABLE", "no request would run at once")
    ready = await unary(gateway, "RepositoryIndex", pb.RepositoryIndexRequest(ready=True), pb.RepositoryIndexResponse)
    assert not ready.models


@pytest.mark.parametrize(
    ("method", "words"), [("CudaSharedMemoryRegister", "in the messages"), ("NoSuchMethod", "ModelStreamInfer")]
)
async def test_a_method_that_is_not_served_is_refused_with_a_way_out(gateway, method, words):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await unary(gateway, method, pb.ServerLiveRequest(), pb.ServerLiveResponse)
    assert refused.value.code().name == "UNIMPLEMENTED"
    assert f"{method} is not served here" in (refused.value.details() or "")
    assert words in (refused.value.details() or "")


async def test_the_server_names_the_extensions_that_it_has(gateway):
    metadata = await unary(gateway, "ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
    over_http = (await gateway.http.get("/v2")).json()
    assert over_http["extensions"] == list(metadata.extensions)
    assert {"parameters", "statistics", "model_configuration"} <= {*metadata.extensions}


async def test_repository_index_knows_no_repository_by_a_name(gateway):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await unary(
            gateway, "RepositoryIndex", pb.RepositoryIndexRequest(repository_name="mine"), pb.RepositoryIndexResponse
        )
    assert refused.value.code().name == "NOT_FOUND"
    assert 'repository_name is "mine"' in (refused.value.details() or "")


JSON = "inputs[2].contents.bytes_contents[0]"


async def refusal(gateway, request) -> QuireError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await infer(gateway, request)
    return from_rpc_error(refused.value)


def with_parameter(name, **value):
    request = make_request("hello", sampling={"top_k": 0})
    request.parameters[name].CopyFrom(pb.InferParameter(**value))
    return request


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (lambda r: r.inputs.__delitem__(0), "inputs", "has no text_input"),
        (lambda r: setattr(r.inputs[0], "datatype", "FP32"), "inputs[0].datatype", "BYTES"),
        (lambda r: setattr(r.inputs[0], "name", "other"), "inputs[0].name", "text_input"),
        (lambda r: r.inputs[1].contents.bool_contents.append(True), "inputs[1].shape", "2 came"),
        (lambda r: setattr(r.inputs[1], "name", "text_input"), "inputs[1].name", "which is repeated"),
        (lambda r: r.raw_input_contents.append(b"\x05"), "raw_input_contents", "1 entries for 3 inputs"),
        (
            lambda r: r.inputs[0].contents.bytes_contents.__setitem__(0, b"\xff"),
            "inputs[0].contents.bytes_contents[0]",
            "UTF-8",
        ),
        (lambda r: r.inputs[2].contents.bytes_contents.__setitem__(0, b"[]"), JSON, "JSON object"),
        (lambda r: r.outputs.add(name="other"), "outputs[0].name", "num_output_tokens"),
        (
            lambda r: r.inputs[0].parameters["shared_memory_region"].MergeFromString(b"\x10\x01"),
            'inputs[0].parameters["shared_memory_region"]',
            "not supported",
        ),
        (
            lambda r: r.outputs.add(name="text_output").parameters["classification"].MergeFromString(b"\x10\x01"),
            'outputs[0].parameters["classification"]',
            "not classes",
        ),
        (lambda r: r.inputs[0].shape.append(2), "inputs[0].shape", "[N, 1]"),
        (lambda r: r.raw_input_contents.extend([b"\x05", b"\x01", b""]), "raw_input_contents[0]", "elements of BYTES"),
        (lambda r: r.inputs[2].contents.bytes_contents.__setitem__(0, b'{"stop": "\\ud800"}'), JSON, "valid JSON"),
    ],
)
async def test_a_tensor_at_fault_is_named(gateway, change, field, words):
    request = make_request("hello")
    change(request)
    error = await refusal(gateway, request)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.violations[0].field == field
    assert words in error.violations[0].description
    assert error.message.startswith(f"{field} ")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"prompt_embeds": "a"}, "is not supported by this version"),
        ({"ignore_eos": "perhaps"}, 'is "perhaps"; it must be true or false'),
        ({"prompt": "hello"}, "is not a sampling parameter; set the input text_input"),
        ({"stream": True}, "set the input stream"),
        ({"logprobs": 3}, "return_logprobs"),
        ({"prompt_logprobs": 3}, "no output"),
    ],
)
async def test_a_sampling_parameter_in_the_tensor_is_named_by_its_place(gateway, value, words):
    error = await refusal(gateway, make_request("hello", sampling=value))
    (violation,) = error.violations
    assert violation.field.startswith(f"{JSON}[")
    assert next(iter(value)) in violation.field
    assert words in violation.description


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", {"int64_param": 0}, "is 0; it must be in"),
        ("temperature", {"double_param": float("nan")}, "finite"),
        ("temperature", {"string_param": "warm"}, "must be a number"),
        ("ignore_eos", {"int64_param": 1}, "must be true or false"),
        ("sequence_id", {"int64_param": 7}, "no state"),
        ("timeout", {"int64_param": 1000}, "deadline"),
        ("seed", {}, "has no value"),
    ],
)
async def test_a_parameter_of_the_request_is_named_by_its_key(gateway, name, value, words):
    error = await refusal(gateway, with_parameter(name, **value))
    (violation,) = error.violations
    assert violation.field == f'parameters["{name}"]'
    assert words in violation.description


def test_of_very_many_inputs_that_are_none_few_are_named():
    request = make_request("hello")
    for _ in range(1000):
        request.inputs.add()
    with pytest.raises(InvalidArgument) as raised:
        read_inputs(request, {})
    assert len(raised.value.violations) == 16


@pytest.mark.parametrize(
    ("raw", "field"), [(False, "inputs[0].contents.bytes_contents[1]"), (True, "raw_input_contents[0][1]")]
)
async def test_the_prompt_at_fault_is_named_among_several(gateway, raw, field):
    error = await refusal(gateway, make_request("hello", "fox " * 2000, raw=raw))
    assert error.violations[0].field == field


@pytest.mark.parametrize("text", ["true", "True", "TRUE"])
async def test_values_may_come_as_texts_and_null_is_as_good_as_absent(gateway, rig, text):
    given = {"max_tokens": "2", "skip_special_tokens": "False", "logprobs": None, "stream": None, "no_such": None}
    request = make_request("hello", sampling=given)
    texts = {"ignore_eos": text, "temperature": "0.5", "stop_token_ids": "[7, 9]", "early_stopping": "False"}
    for name, value in texts.items():
        request.parameters[name].string_param = value
    assert (await infer(gateway, request)).outputs
    submit = rig.scheduler.submits[-1]
    assert (submit.output.include_special_tokens, list(submit.eos_token_ids)) == (True, [])
    assert (row_sampling(submit).sampling.temperature, submit.stopping.max_tokens) == (0.5, 2)
    assert list(submit.stopping.stop_token_ids) == [7, 9]


@pytest.mark.parametrize(("attribute", "value"), [("model_name", ""), ("model_version", "7")])
async def test_a_model_that_is_not_served_is_not_found(gateway, attribute, value):
    request = make_request("hello")
    setattr(request, attribute, value)
    error = await refusal(gateway, request)
    assert error.code is grpc.StatusCode.NOT_FOUND
    assert error.message.startswith(f'{attribute} is "{value}"; ')


async def test_what_streams_only_cannot_be_asked_of_one_answer(gateway):
    error = await refusal(gateway, make_request("hello", stream=True))
    assert error.violations[0].field == "inputs[1].contents.bool_contents[0]"
    assert "ModelStreamInfer" in error.message


async def test_a_stream_refuses_several_prompts_texts_and_the_input(gateway):
    several = make_request("hello", "hello", stream=True, request_id="several")
    including = make_request("hello", stream=True, request_id="including")
    flag = including.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    flag.contents.bool_contents.append(False)
    texts = make_request("hello", stream=True, request_id="texts", sampling={"n": 2})
    responses = await infer_stream(gateway, several, including, texts)
    errors = {response.infer_response.id: response.error_message for response in responses}
    assert errors == {
        "several": "inputs[0] has 2 prompts; a streamed request has 1",
        "including": "inputs[3].contents.bool_contents[0] is false; a streamed text never has its prompt",
        "texts": f'{JSON}["n"] is 2; a streamed request has one text',
    }


async def test_requests_of_a_stream_count_in_the_memory_of_bodies_until_they_are_answered(scheduler):
    request = make_request("hello", stream=True)
    request.parameters["user"].string_param = "x" * 6000
    async with running_gateway(scheduler, max_message_bytes=10_000, max_total_body_bytes=50_000) as gateway:
        has_ended = asyncio.Event()

        async def one_by_one():
            for _ in range(3):
                yield request
                await has_ended.wait()
                has_ended.clear()

        async for response in stream_call(gateway)(one_by_one(), timeout=30):
            if response.infer_response.parameters["triton_final_response"].bool_param:
                has_ended.set()
        scheduler.emits.clear()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await infer_stream(gateway, request, request)
        scheduler.emits.set()
    assert from_rpc_error(raised.value).reason == "BODIES_FULL"
