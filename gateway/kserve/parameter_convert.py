"""The sampling parameters of a request, from its two places: its own parameters, and JSON in a tensor."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.api.body import body_of
from gateway.kserve.tensor_convert import Tensor
from gateway.openai.schemas import CompletionBody
from gateway.request.violations import Violations, renamed, shortened
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import QuireError

INPUT_NAME = "sampling_parameters"

# Clients of Triton send what is about the server, not about sampling, by such names.
_SERVER_PREFIX = "triton_"
# No parameter has a longer name, and an error shows no more of one.
_MAX_NAME = 80
MAX_PARAMETERS = 1024
# What has a place of its own in the request.
_ELSEWHERE = {
    "model": "model_name",
    "request_id": "id",
    "prompt": "the input text_input",
    "echo": "the input exclude_input_in_output",
    "stream": "the input stream",
    "exclude_input_in_output": "the input of that name",
    "return_finish_reason": "the input of that name",
    "return_cumulative_logprob": "the input of that name",
    "return_logprobs": "the input of that name",
    "return_num_input_tokens": "the input of that name",
    "return_num_output_tokens": "the input of that name",
}
_NO_STATE = "is set; requests have no state that they could share"
_REFUSED = {
    **{name: f"is no sampling parameter; set {place}" for name, place in _ELSEWHERE.items()},
    **dict.fromkeys(("stream_options", "add_special_tokens"), "is not supported by this version"),
    "prompt_logprobs": "is set; no output has log probabilities of the prompt",
    **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), _NO_STATE),
    "timeout": "is set; set the deadline of the call instead",
}
_TRUTH = {"true": True, "false": False}
_FLAGS = frozenset(name for name, field in CompletionBody.model_fields.items() if field.annotation == bool | None)
_TEXTS = frozenset({"stop", "early_stopping"})


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Parameters by the names of completions; one that came in both places has the value of the tensor.

    Attributes:
        values: What was asked.
        paths: Where in the request each of them is.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, str]

    def path(self, field: str) -> str:
        """Where in the request a field of the completion is, or would be: a parameter, or something in it."""
        if field in self.paths:
            return self.paths[field]
        name, bracket, rest = field.partition("[")
        return self.paths.get(name, _parameter_path(name)) + bracket + rest

    def body(self) -> CompletionBody:
        """Raises InvalidArgument: a parameter is unknown, not supported or of the wrong type."""
        try:
            return body_of(CompletionBody, self.values)
        except QuireError as error:
            raise renamed(error, self.path) from error


def read_sampling_fields(request: pb.ModelInferRequest, tensor: Tensor | None) -> SamplingFields:
    """`tensor` is the input `sampling_parameters`; None where it is absent.

    Raises:
        InvalidArgument: a parameter is none, or its text means nothing.
    """
    violations = Violations()
    if not violations.check_count("parameters", request.parameters, MAX_PARAMETERS):
        violations.raise_if_any()
    own = _own_fields(violations, request)
    in_tensor = {} if tensor is None else _json_fields(violations, tensor)
    paths = {name: _parameter_path(name) for name in own}
    if tensor is not None:
        paths |= {name: f'{tensor.element(0)}["{name}"]' for name in in_tensor}
    values = own | in_tensor
    for name, value in values.items():
        if name in _REFUSED and value is not None:
            violations.add(paths[name], _REFUSED[name])
    read = {name: _value(violations, paths[name], name, value) for name, value in values.items()}
    violations.raise_if_any()
    return SamplingFields(read, paths)


def _parameter_path(name: str) -> str:
    return f'parameters["{name}"]'


def _own_fields(violations: Violations, request: pb.ModelInferRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if name.startswith(_SERVER_PREFIX):
            continue
        if choice is None:
            violations.add(_parameter_path(name[:_MAX_NAME]), "has no value")
        else:
            fields[name[:_MAX_NAME]] = getattr(parameter, choice)
    return fields


def _json_fields(violations: Violations, tensor: Tensor) -> dict[str, Any]:
    if len(tensor.values) != 1:
        violations.add(tensor.field, f"has {len(tensor.values):,} elements; {INPUT_NAME} must have 1")
        return {}
    try:
        fields = json.loads(bytes(tensor.values[0]))
        json.dumps(fields, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        violations.add(tensor.element(0), "is not valid JSON")
        return {}
    if not isinstance(fields, dict):
        violations.add(tensor.element(0), "is no JSON object")
        return {}
    return {name[:_MAX_NAME]: value for name, value in fields.items()}


def _value(violations: Violations, path: str, name: str, value: Any) -> Any:
    """Triton's clients write numbers and flags as texts, too."""
    if not isinstance(value, str):
        return value
    if name in _FLAGS:
        if value.lower() not in _TRUTH:
            violations.add(path, f'is "{shortened(value)}"; it must be true or false')
        return _TRUTH.get(value.lower())
    if name in _TEXTS:
        return _TRUTH.get(value.lower(), value) if name == "early_stopping" else value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
