"""Whatever a request of the Open Inference Protocol holds, it is taken or refused by naming its fields."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.kserve.inference import INPUTS, OUTPUTS, Inference, read_inference
from gateway.api.openai.schemas import CompletionBody
from quire.common.v1.common_pb2 import Choice, Constraint
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import InvalidArgument

FIELDS = ("inputs", "outputs", "raw_input_contents", "parameters[")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.sampled_from([*CompletionBody.model_fields, "timeout", "triton_x", "a.b", "[", ""]) | st.text(max_size=90)
CHOICES = st.one_of(
    st.just(pb.InferParameter()),
    st.booleans().map(lambda value: pb.InferParameter(bool_param=value)),
    st.integers(-(2**63), 2**63 - 1).map(lambda value: pb.InferParameter(int64_param=value)),
    st.integers(0, 2**64 - 1).map(lambda value: pb.InferParameter(uint64_param=value)),
    st.floats().map(lambda value: pb.InferParameter(double_param=value)),
    st.sampled_from(["true", "False", "NaN", "1e999", "[1]", "{}", "9" * 5000]).map(
        lambda value: pb.InferParameter(string_param=value)
    ),
)


@st.composite
def requests(draw) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m")
    names = draw(st.lists(st.sampled_from(list(INPUTS)) | st.text(max_size=5), max_size=5))
    for name in ["text_input", *names] if draw(st.booleans()) else names:
        datatype = draw(st.sampled_from([INPUTS.get(name, "BYTES"), "BYTES", "BOOL", "FP32", ""]))
        tensor = request.inputs.add(name=name, datatype=datatype)
        elements = draw(st.lists(st.binary(max_size=8) | JSON_VALUES.map(lambda value: json.dumps(value).encode())))
        tensor.contents.bytes_contents.extend(elements)
        tensor.contents.bool_contents.extend(draw(st.lists(st.booleans(), max_size=2)))
        tensor.shape.extend(draw(st.sampled_from([[1], [1, 1], [len(elements)], [0], [-1], [2, 3], []])))
    if draw(st.booleans()):
        request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=12), max_size=6)))
    for name, value in draw(st.dictionaries(NAMES, CHOICES, max_size=4)).items():
        request.parameters[name].CopyFrom(value)
    for name in draw(st.lists(st.sampled_from(list(OUTPUTS)) | st.text(max_size=5), max_size=3)):
        request.outputs.add(name=name)
    return request


@st.composite
def sampled_requests(draw) -> pb.ModelInferRequest:
    """One prompt, and anything as its sampling parameters."""
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    tensor = request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(json.dumps(draw(st.dictionaries(NAMES, JSON_VALUES, max_size=4))).encode())
    for name, value in draw(st.dictionaries(NAMES, CHOICES, max_size=4)).items():
        request.parameters[name].CopyFrom(value)
    return request


def read(request: pb.ModelInferRequest, *, in_stream: bool) -> Inference | list[str]:
    """What is asked, or the fields at fault."""
    try:
        return read_inference(request, in_stream=in_stream)
    except InvalidArgument as error:
        return [violation.field for violation in error.violations]


@settings(deadline=None)
@given(requests() | sampled_requests(), st.booleans())
def test_a_request_is_read_or_refused_by_its_own_fields(request, in_stream):
    found = read(request, in_stream=in_stream)
    if isinstance(found, Inference):
        assert len(found.prompts) == len(found.options) >= 1
        assert "text_output" in found.outputs or request.outputs
    else:
        assert found
        assert all(field.startswith(FIELDS) for field in found)


def sampled(fields: dict, **parameters: str) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    tensor = request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(json.dumps(fields).encode())
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def test_a_text_may_be_constrained_as_over_http():
    for request, constraint in (
        (sampled({}, guided_regex="[0-9]"), Constraint(regex="[0-9]")),
        (sampled({}, guided_json='{"type": "object"}'), Constraint(json_schema='{"type":"object"}')),
        (sampled({"structured_outputs": {"choice": ["a"]}}), Constraint(choice=Choice(texts=["a"]))),
    ):
        inference = read(request, in_stream=False)
        assert isinstance(inference, Inference)
        assert inference.options[0].sampling.constraint == constraint
    wrong = sampled({"structured_outputs": {"regex": "a", "choice": ["b"]}})
    place = 'inputs[1].contents.bytes_contents[0]["structured_outputs"]'
    assert read(wrong, in_stream=False) == [f"{place}.choice"]
