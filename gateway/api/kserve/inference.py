"""Conversion of ModelInferRequests to requests of the generator, and of generated output to responses.

Tensors have contents or raw bytes. Inputs are BYTES and BOOL; outputs are BYTES, UINT32 and FP32. Sampling parameters
are parameters of the request, or JSON in the input `sampling_parameters`, with the names of completions.
"""

import dataclasses
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic_core import from_json

from gateway.api.answer_parts import logprobs_by_token_id
from gateway.api.answers import as_json
from gateway.api.body import validated
from gateway.api.field_rule import FieldRule
from gateway.api.generation_fields import Body, CompletionBody, completion_options, names_of
from gateway.replicas.events import Chunk, Finished, PositionLogprobs, Usage
from gateway.request.body_memory import count_memory
from gateway.request.counting import (
    MAX_VALUES_OF_TEXTS,
    NO_MESSAGES,
    check_json,
    check_values,
    num_values_in,
)
from gateway.request.generator import Result
from gateway.request.violations import Violations, renaming, shortened
from gateway.text.tokenizer import TokenTexts
from gateway.types import RequestOptions, TextPrompt
from quire.inference import open_inference_pb2 as pb

BodyType = TypeVar("BodyType", bound=Body)
Value = bytes | bool
Element = bytes | int | float
_Row = tuple[bytes, bytes, float, bytes, int, int]
InputTensor = pb.ModelInferRequest.InferInputTensor
OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor

MAX_ELEMENTS = 1024
"""The maximum number of elements of an input. Each prompt becomes a request."""

_SIZE = struct.Struct("<I")
_CONTENTS = {
    "BYTES": "bytes_contents",
    "BOOL": "bool_contents",
    "UINT32": "uint_contents",
    "FP32": "fp32_contents",
}
# Parameters of a tensor that would change its elements. Other parameters only describe it.
_REFUSED_OF_TENSORS = {
    "shared_memory_region": "is set; shared memory is not supported, send elements in the message",
    "classification": "is set; the outputs of this model are not classes",
}

INPUT_NAME = "sampling_parameters"

# Prefix of parameters for the server, which clients of Triton send.
_SERVER_PREFIX = "triton_"
# Longer than any parameter's name; errors cut names off here.
_MAX_NAME = 80
# Maximum numbers in all lists of `sampling_parameters`: enough for the tokens of two large vocabularies.
_MAX_NUMBERS = 1 << 19
MAX_PARAMETERS = 1024
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
# Outputs that the BOOL inputs return_NAME request.
_OPTIONAL_OUTPUTS = tuple(name for name in OUTPUTS if name != "text_output")
INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    INPUT_NAME: "BYTES",
    "exclude_input_in_output": "BOOL",
    **{f"return_{name}": "BOOL" for name in _OPTIONAL_OUTPUTS},
}
# Fields that have another place in the request.
_ELSEWHERE = {
    "model": "model_name",
    "request_id": "id",
    "prompt": "the input text_input",
    "echo": "the input exclude_input_in_output",
    "stream": "the input stream",
    "exclude_input_in_output": "the input of that name",
    **{f"return_{name}": "the input of that name" for name in _OPTIONAL_OUTPUTS},
}
_NO_STATE = "is set; requests have no state that they could share"
_REFUSED = {
    **{name: f"is not a sampling parameter; set {place}" for name, place in _ELSEWHERE.items()},
    **dict.fromkeys(("stream_options", "add_special_tokens"), "is not supported by this version"),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), "is set; outputs have no token ids"),
    "include_metrics": "is set; no output has metrics of a request",
    "suffix": "is not supported by this version",
    "prompt_logprobs": "is set; no output has log probabilities of the prompt",
    **dict.fromkeys(("sequence_id", "sequence_start", "sequence_end"), _NO_STATE),
    "timeout": "is set; set the deadline of the call instead",
}
_TRUTH = {"true": True, "false": False}
_FLAGS = frozenset(name for name, field in CompletionBody.model_fields.items() if field.annotation == bool | None)
_TEXTS = frozenset(
    {
        "stop",
        "early_stopping",
        "prompt_name",
        "truncation_side",
        "guided_regex",
        "guided_grammar",
        "guided_decoding_backend",
        "structural_tag",
    }
)
_OF_LOGPROBS = ("cumulative_logprob", "logprobs")
MODEL_VERSION = "1"
_FINAL = "triton_final_response"


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input tensor.

    Attributes:
        field: Its path in the request.
        contents: The path of the list of its elements.
        values: Its elements, as the Python type of its datatype.
    """

    field: str
    contents: str
    values: Sequence[Value]

    def element(self, position: int) -> str:
        """The path of one of its elements in the request."""
        return f"{self.contents}[{position}]"


def read_inputs(request: pb.ModelInferRequest, datatypes: Mapping[str, str]) -> dict[str, Tensor]:
    """The inputs by name. `datatypes` has the datatypes of all inputs of the model.

    Raises:
        InvalidArgument: an input is unknown or repeated, or its datatype or shape does not fit.
    """
    violations = Violations()
    raw: Sequence[bytes] = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        violations.add("raw_input_contents", f"has {len(raw)} entries for {len(request.inputs)} inputs")
        violations.raise_if_any()
    found: dict[str, Tensor] = {}
    for position, tensor in enumerate(request.inputs):
        if violations.are_enough:
            break
        field = f"inputs[{position}]"
        if tensor.name in found:
            violations.add(f"{field}.name", f'is "{shortened(tensor.name)}", which is repeated')
        elif _check_head(violations, field, tensor, datatypes):
            if raw:
                contents, values = f"raw_input_contents[{position}]", values_of_bytes(tensor.datatype, raw[position])
            else:
                contents = f"{field}.contents.{_CONTENTS[tensor.datatype]}"
                values = getattr(tensor.contents, _CONTENTS[tensor.datatype])
            _check_shape(violations, field, tensor, values, contents)
            found[tensor.name] = Tensor(field, contents, values or [])
    violations.raise_if_any()
    return found


def check_tensor_parameters(violations: Violations, field: str, tensor: InputTensor | OutputTensor) -> None:
    for name, description in _REFUSED_OF_TENSORS.items():
        if name in tensor.parameters:
            violations.add(f'{field}.parameters["{name}"]', description)


def _check_head(violations: Violations, field: str, tensor: InputTensor, datatypes: Mapping[str, str]) -> bool:
    check_tensor_parameters(violations, field, tensor)
    expected = datatypes.get(tensor.name)
    if expected is None:
        known = ", ".join(datatypes)
        violations.add(f"{field}.name", f'is "{shortened(tensor.name)}"; the inputs of this model are {known}')
    elif tensor.datatype != expected:
        violations.add(
            f"{field}.datatype", f'is "{shortened(tensor.datatype)}"; {tensor.name} is a tensor of {expected}'
        )
    else:
        return True
    return False


def _check_shape(
    violations: Violations, field: str, tensor: InputTensor, values: Sequence[Value] | None, contents: str
) -> None:
    """Checks that the shape is [N] or [N, 1] with N values; `values` is None if they cannot be read."""
    shape = list(tensor.shape)
    if values is not None and len(values) > MAX_ELEMENTS:
        violations.add(
            contents, f"has more than {MAX_ELEMENTS:,} elements, which is the max; send fewer prompts at once"
        )
    elif len(shape) not in (1, 2) or shape[0] < 1 or shape[1:] not in ([], [1]):
        violations.add(f"{field}.shape", f"is {shortened(str(shape))}; it must be [N] or [N, 1] with N of at least 1")
    elif values is None:
        violations.add(contents, f"is not a sequence of elements of {tensor.datatype}")
    elif len(values) != shape[0]:
        violations.add(f"{field}.shape", f"is {shape}, of {shape[0]:,} elements; {len(values):,} came in {contents}")


def values_of_bytes(datatype: str, data: bytes) -> list[Value] | None:
    """The elements in `data`; None if it is invalid for the datatype. Reads at most one element beyond the maximum."""
    enough = MAX_ELEMENTS + 1
    if datatype == "BOOL":
        return [byte != 0 for byte in data[:enough]]
    values: list[Value] = []
    position = 0
    while position < len(data) and len(values) < enough:
        start = position + _SIZE.size
        if start > len(data):
            return None
        (size,) = _SIZE.unpack_from(data, position)
        position = start + size
        if position > len(data):
            return None
        values.append(data[start:position])
    return values


def bytes_of(datatype: str, values: Sequence[Element]) -> bytes:
    """The elements of an output as bytes."""
    return b"".join(map(_RAW_ELEMENTS[datatype], values))


_RAW_ELEMENTS: Mapping[str, Callable[[Any], bytes]] = {
    "BYTES": lambda value: _SIZE.pack(len(value)) + value,
    "UINT32": struct.Struct("<I").pack,
    "FP32": struct.Struct("<f").pack,
}


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """Sampling parameters by their names in completions. The tensor takes precedence over parameters of the request.

    Attributes:
        values: The values by name.
        paths: The path of each value in the request.
    """

    values: Mapping[str, Any]
    paths: Mapping[str, str]

    def path(self, field: str) -> str:
        """The path in the request of a field of the completion, or of an entry of it."""
        if field in self.paths:
            return self.paths[field]
        name = re.split(r"[.\[]", field, maxsplit=1)[0]
        return self.paths.get(name, _parameter_path(name)) + field.removeprefix(name)

    def body(self, rule: FieldRule, kind: type[BodyType]) -> BodyType:
        """The body of this kind. Raises InvalidArgument if `rule` rejects a parameter, or its type is wrong."""
        with renaming(lambda: self.path):
            check_json(self.values, NO_MESSAGES)
            body, violations = validated(kind, self.values), Violations()
            rule.check(violations, body, "kserve")
            body.check(violations, rule)
            violations.raise_if_any()
            return body


def read_sampling_fields(request: pb.ModelInferRequest, tensor: Tensor | None) -> SamplingFields:
    """The sampling parameters of a request. `tensor` is the input `sampling_parameters`; None if it is absent.

    Raises:
        InvalidArgument: a parameter is unknown, or its text cannot be parsed.
    """
    violations = Violations()
    if not violations.check_count("parameters", request.parameters, MAX_PARAMETERS):
        violations.raise_if_any()
    own: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None and not name.startswith(_SERVER_PREFIX):
            own[name[:_MAX_NAME]] = getattr(parameter, choice)
        elif choice is None and not name.startswith(_SERVER_PREFIX):
            violations.add(_parameter_path(name[:_MAX_NAME]), "has no value")
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


def _json_fields(violations: Violations, tensor: Tensor) -> dict[str, Any]:
    if len(tensor.values) != 1:
        violations.add(tensor.field, f"has {len(tensor.values):,} elements; {INPUT_NAME} must have 1")
        return {}
    try:
        data = bytes(tensor.values[0])
        count_memory(check_values(data, NO_MESSAGES, tensor.element(0), max_numbers=_MAX_NUMBERS))
        fields = from_json(data)
    except ValueError as error:
        violations.add(tensor.element(0), f"is not valid JSON: {error}")
        return {}
    if not isinstance(fields, dict):
        violations.add(tensor.element(0), "is not a JSON object")
        return {}
    return {name[:_MAX_NAME]: value for name, value in fields.items()}


def _value(violations: Violations, path: str, name: str, value: Any) -> Any:
    """Converts a parameter: clients of Triton also send numbers and flags as texts."""
    if not isinstance(value, str):
        return value
    if name in _FLAGS:
        if value.lower() not in _TRUTH:
            violations.add(path, f'is "{shortened(value)}"; it must be true or false')
        return _TRUTH.get(value.lower())
    if name in _TEXTS:
        return _TRUTH.get(value.lower(), value) if name == "early_stopping" else value
    try:
        return value if num_values_in(value) > MAX_VALUES_OF_TEXTS else from_json(value)
    except ValueError:
        return value


@dataclass(frozen=True, slots=True)
class Inference:
    """One request of the protocol.

    Attributes:
        id: The id of its responses.
        prompts: The prompts, one for each text.
        options: The request of the generator for each prompt.
        streams: Whether the text is sent in pieces.
        includes_input: Whether each text begins with its prompt.
        outputs: The names of the outputs.
        num_top: The number of most likely tokens with log probabilities, in addition to the chosen token.
        raw: Whether tensors are raw bytes, in the request and in the response.
        body: The sampling parameters, as a completion.
        sampling: The sampling parameters with their paths in the request.
        text_input: The input of the prompts.
    """

    id: str
    prompts: tuple[str, ...]
    options: tuple[RequestOptions, ...]
    streams: bool
    includes_input: bool
    outputs: frozenset[str]
    num_top: int
    raw: bool
    body: CompletionBody
    sampling: SamplingFields
    text_input: Tensor

    def path(self, position: int, field: str) -> str:
        """The path of a field of the validator, for the prompt at `position`."""
        name = names_of(self.body)(field)
        return self.text_input.element(position) if name == "prompt" else self.sampling.path(name)


def read_inference(request: pb.ModelInferRequest, rule: FieldRule, *, in_stream: bool) -> Inference:
    """Reads a request, before validation of its options. `in_stream` is whether it came by ModelStreamInfer.

    Raises:
        InvalidArgument: a tensor or a parameter is wrong.
    """
    inputs = read_inputs(request, INPUTS)
    violations = Violations()
    prompts = texts_of(violations, inputs, "text_input")
    flags = {name: _flag(violations, inputs, name) for name, datatype in INPUTS.items() if datatype == "BOOL"}
    streams = bool(flags["stream"])
    if streams:
        _check_streaming(violations, inputs, in_stream=in_stream)
    outputs = _outputs(violations, request, flags)
    violations.raise_if_any()
    sampling = read_sampling_fields(request, inputs.get(INPUT_NAME))
    body = sampling.body(rule, CompletionBody)
    if streams and (body.n or 1) > 1:
        violations.add(sampling.path("n"), f"is {body.n}; a streamed request has one text")
    if body.logprobs is not None and "logprobs" not in outputs:
        violations.add(
            sampling.path("logprobs"), "is set, and the input return_logprobs is not; set that to get log probabilities"
        )
    violations.raise_if_any()
    logprobs = body.logprobs if outputs.isdisjoint(_OF_LOGPROBS) else body.logprobs or 0
    body = body.model_copy(update={"model": request.model_name, "logprobs": logprobs})
    # All requests share one object with their parameters. The protocol's ids may repeat among running requests, so the
    # gateway generates its own.
    options = dataclasses.replace(completion_options(body, None, ""), request_id=None)
    return Inference(
        id=request.id,
        prompts=prompts,
        options=tuple(dataclasses.replace(options, prompt=TextPrompt(prompt)) for prompt in prompts),
        streams=streams,
        includes_input=not streams and not flags["exclude_input_in_output"],
        outputs=outputs,
        num_top=logprobs or 0,
        raw=bool(request.raw_input_contents),
        body=body,
        sampling=sampling,
        text_input=inputs["text_input"],
    )


def texts_of(violations: Violations, inputs: Mapping[str, Tensor], name: str) -> tuple[str, ...]:
    """The texts of an input that a request must have."""
    tensor = inputs.get(name)
    if tensor is None:
        violations.add("inputs", f"has no {name}")
        return ()
    texts: list[str] = []
    for position, value in enumerate(tensor.values):
        try:
            texts.append(bytes(value).decode())
        except UnicodeDecodeError:
            violations.add(tensor.element(position), "is not valid UTF-8")
    return tuple(texts)


def _flag(violations: Violations, inputs: Mapping[str, Tensor], name: str) -> bool | None:
    """The only element of a BOOL input; None if it is absent."""
    tensor = inputs.get(name)
    if tensor is None:
        return None
    if len(tensor.values) != 1:
        violations.add(tensor.field, f"has {len(tensor.values):,} elements; {name} must have 1")
    return bool(tensor.values[0])


def _check_streaming(violations: Violations, inputs: Mapping[str, Tensor], *, in_stream: bool) -> None:
    if not in_stream:
        violations.add(inputs["stream"].element(0), "is true; ModelInfer does not stream, use ModelStreamInfer")
    prompts = inputs.get("text_input")
    if prompts is not None and len(prompts.values) > 1:
        violations.add(prompts.field, f"has {len(prompts.values):,} prompts; a streamed request has 1")
    excluding = inputs.get("exclude_input_in_output")
    if excluding is not None and not excluding.values[0]:
        violations.add(excluding.element(0), "is false; a streamed text never has its prompt")


def _outputs(violations: Violations, request: pb.ModelInferRequest, flags: dict[str, bool | None]) -> frozenset[str]:
    asked = {name for name in _OPTIONAL_OUTPUTS if flags[f"return_{name}"]}
    return frozenset((check_outputs(violations, request, OUTPUTS) or {"text_output"}) | asked)


def check_outputs(violations: Violations, request: pb.ModelInferRequest, known: Iterable[str]) -> set[str]:
    """The names of the outputs that a request names, among the ones of the model."""
    for position, output in enumerate(request.outputs):
        field = f"outputs[{position}]"
        check_tensor_parameters(violations, field, output)
        if output.name not in known:
            listed = ", ".join(known)
            violations.add(f"{field}.name", f'is "{shortened(output.name)}"; the outputs of this model are {listed}')
    return {output.name for output in request.outputs}


class Responder:
    """Makes the responses to one request: either only `whole`, or `piece` for each chunk and `last` at the end."""

    def __init__(self, model: str, inference: Inference, texts: TokenTexts) -> None:
        self._model = model
        self._inference = inference
        self._texts = texts
        self._cumulative_logprob = 0.0

    def whole(self, results: Sequence[Result]) -> pb.ModelInferResponse:
        """All sequences of all prompts, in the order of the prompts; `results` has one entry per prompt."""
        rows: list[_Row] = []
        for prompt, (sequences, usage) in zip(self._inference.prompts, results, strict=True):
            before = prompt if self._inference.includes_input else ""
            for each in sequences:
                text, finished = f"{before}{each.text}", each.finished
                logprob = _summed(each.logprobs)
                rows.append(self._row(text, finished, logprob, each.logprobs, usage.prompt_tokens, finished.num_tokens))
        return self._response(rows)

    def piece(self, chunk: Chunk) -> pb.ModelStreamInferResponse:
        """The next piece of a streamed text; the cumulative log probability covers all pieces so far."""
        self._cumulative_logprob += _summed(chunk.logprobs)
        row = self._row(chunk.text, None, self._cumulative_logprob, chunk.logprobs, 0, len(chunk.token_ids))
        return in_stream(self._response([row]), is_final=False)

    def last(self, finished: Finished, usage: Usage) -> pb.ModelStreamInferResponse:
        """The end of a streamed text, with the finish reason and the number of prompt tokens."""
        row = self._row("", finished, self._cumulative_logprob, [], usage.prompt_tokens, 0)
        return in_stream(self._response([row]), is_final=True)

    def _row(
        self,
        text: str,
        finished: Finished | None,
        cumulative_logprob: float,
        logprobs: Iterable[PositionLogprobs],
        num_input: int,
        num_output: int,
    ) -> _Row:
        """One element for each of `OUTPUTS`. Log probabilities are JSON: for each position an object with the chosen
        and the most likely tokens, by id."""
        shown, reason = b"", b"" if finished is None else finished.reason.value.encode()
        if "logprobs" in self._inference.outputs:
            shown = as_json(logprobs_by_token_id(self._texts, logprobs, self._inference.num_top))
        return text.encode(), reason, cumulative_logprob, shown, num_input, num_output

    def _response(self, rows: Sequence[_Row]) -> pb.ModelInferResponse:
        inference = self._inference
        response = pb.ModelInferResponse(model_name=self._model, model_version=MODEL_VERSION, id=inference.id)
        for (name, datatype), values in zip(OUTPUTS.items(), zip(*rows, strict=True), strict=True):
            if name not in inference.outputs:
                continue
            tensor = response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
            if inference.raw:
                response.raw_output_contents.append(bytes_of(datatype, values))
            else:
                getattr(tensor.contents, _CONTENTS[datatype]).extend(values)
        return response


def in_stream(response: pb.ModelInferResponse, *, is_final: bool) -> pb.ModelStreamInferResponse:
    response.parameters[_FINAL].bool_param = is_final
    return pb.ModelStreamInferResponse(infer_response=response)


def error_response(model: str, request_id: str, message: str) -> pb.ModelStreamInferResponse:
    """The last response to a request that failed."""
    head = pb.ModelInferResponse(model_name=model, id=request_id)
    response = in_stream(head, is_final=True)
    response.error_message = message
    return response


def _summed(logprobs: Iterable[PositionLogprobs]) -> float:
    return sum(each.chosen.logprob for each in logprobs)
