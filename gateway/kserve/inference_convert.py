"""A ModelInferRequest as what it asks for: its prompts, how they are sampled, what comes back."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from gateway.kserve.tensor_convert import Value, read_inputs
from gateway.openai.body import parse_body
from gateway.openai.options import completion_options
from gateway.openai.schemas import CompletionBody
from gateway.request import RequestOptions, TextPrompt
from gateway.violations import Violations, shortened
from quire.inference import open_inference_pb2 as pb

# Each prompt is a request of its own.
MAX_PROMPTS = 1024

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
# What is asked for by a BOOL input and comes back as an output of its own.
_OPTIONAL_OUTPUTS = tuple(name for name in OUTPUTS if name != "text_output")
# Clients of Triton send what is about the server, not about sampling, by such names.
_SERVER_PREFIX = "triton_"
# These have a place of their own in the request.
_ELSEWHERE = frozenset({"model", "prompt", "echo", "stream", "stream_options", "request_id", "add_special_tokens"})
_TEXTS = frozenset({"stop", "early_stopping"})


@dataclass(frozen=True, slots=True)
class Inference:
    """One request of the protocol.

    Attributes:
        id: What its responses carry.
        prompts: One a requested text.
        options: What each prompt asks of the generator, in their order.
        streams: Whether the text comes in pieces.
        includes_input: Whether each text begins with its prompt.
        outputs: The outputs that are wanted.
        raw: Whether tensors come and go as raw bytes.
    """

    id: str
    prompts: tuple[str, ...]
    options: tuple[RequestOptions, ...]
    streams: bool
    includes_input: bool
    outputs: frozenset[str]
    raw: bool


def read_inference(request: pb.ModelInferRequest, *, in_stream: bool) -> Inference:
    """What a request asks for; its options are still to be validated. `in_stream` tells by which method it came.

    Raises:
        InvalidArgument: a tensor or a parameter is at fault.
    """
    inputs = read_inputs(request, INPUTS)
    violations = Violations()
    prompts = _prompts(violations, inputs)
    flags = {name: _flag(violations, inputs, name) for name, datatype in INPUTS.items() if datatype == "BOOL"}
    streams = bool(flags["stream"])
    _check_streaming(violations, streams, len(prompts), flags["exclude_input_in_output"], in_stream=in_stream)
    outputs = _outputs(violations, request, flags)
    violations.raise_if_any()
    body = parse_body(CompletionBody, json.dumps(_sampling_fields(request, inputs)).encode())
    if streams and (body.n or 1) > 1:
        violations.add("n", f"is {body.n}; a streamed request has one text")
        violations.raise_if_any()
    model = {"model": request.model_name} if request.model_name else {}
    body = body.model_copy(update=model)
    return Inference(
        id=request.id,
        prompts=prompts,
        options=tuple(_options(body, prompt) for prompt in prompts),
        streams=streams,
        includes_input=not streams and not flags["exclude_input_in_output"],
        outputs=outputs,
        raw=bool(request.raw_input_contents),
    )


def _options(body: CompletionBody, prompt: str) -> RequestOptions:
    # The protocol's id is the client's own and may be used twice at once, so the gateway makes the one it runs by.
    return dataclasses.replace(completion_options(body, TextPrompt(prompt), ""), request_id=None)


def _prompts(violations: Violations, inputs: dict[str, list[Value]]) -> tuple[str, ...]:
    values = inputs.get("text_input")
    if values is None:
        violations.add("inputs", "has no text_input")
        return ()
    violations.check_count("text_input", values, MAX_PROMPTS)
    return tuple(_text(violations, "text_input", value) for value in values)


def _text(violations: Violations, field: str, value: Value) -> str:
    try:
        return bytes(value).decode()
    except UnicodeDecodeError:
        violations.add(field, "is not valid UTF-8")
        return ""


def _flag(violations: Violations, inputs: dict[str, list[Value]], name: str) -> bool | None:
    """The one element of a BOOL input; None where it is absent."""
    values = inputs.get(name)
    if values is None:
        return None
    if len(values) != 1:
        violations.add(name, f"has {len(values):,} elements; it must have 1")
    return bool(values[0])


def _check_streaming(
    violations: Violations, streams: bool, num_prompts: int, excludes_input: bool | None, *, in_stream: bool
) -> None:
    if not streams:
        return
    if not in_stream:
        violations.add("stream", "is true; ModelInfer answers once, use ModelStreamInfer")
    if num_prompts > 1:
        violations.add("text_input", f"has {num_prompts:,} prompts; a streamed request has 1")
    if excludes_input is False:
        violations.add("exclude_input_in_output", "is false; a streamed text never has its prompt")


def _outputs(violations: Violations, request: pb.ModelInferRequest, flags: dict[str, bool | None]) -> frozenset[str]:
    for position, output in enumerate(request.outputs):
        if output.name not in OUTPUTS:
            known = ", ".join(OUTPUTS)
            violations.add(
                f"outputs[{position}].name", f'is "{shortened(output.name)}"; the outputs of this model are {known}'
            )
    asked = {name for name in _OPTIONAL_OUTPUTS if flags[f"return_{name}"]}
    return frozenset(output.name for output in request.outputs) | asked or frozenset({"text_output"}) | asked


def _sampling_fields(request: pb.ModelInferRequest, inputs: dict[str, list[Value]]) -> dict[str, Any]:
    """Sampling parameters by the names of completions; those of the input win over those of the request."""
    violations = Violations()
    fields: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None and not name.startswith(_SERVER_PREFIX):
            fields[name] = getattr(parameter, choice)
    fields |= _json_fields(violations, inputs.get("sampling_parameters"))
    for name in sorted(_ELSEWHERE & fields.keys()):
        violations.add(name, "is no sampling parameter")
    violations.raise_if_any()
    return {name: _value(name, value) for name, value in fields.items()}


def _json_fields(violations: Violations, values: list[Value] | None) -> dict[str, Any]:
    if values is None:
        return {}
    if len(values) != 1:
        violations.add("sampling_parameters", f"has {len(values):,} elements; it must have 1")
        return {}
    try:
        fields = json.loads(bytes(values[0]))
    except (ValueError, RecursionError):
        violations.add("sampling_parameters", "is not valid JSON")
        return {}
    if not isinstance(fields, dict):
        violations.add("sampling_parameters", "is no JSON object")
        return {}
    return fields


def _value(name: str, value: Any) -> Any:
    """Triton's clients write numbers as texts, too."""
    if not isinstance(value, str) or name in _TEXTS:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
