"""A ModelInferRequest as what it asks for: its prompts, how they are sampled, what comes back."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.kserve.parameter_convert import INPUT_NAME, SamplingFields, read_sampling_fields
from gateway.kserve.tensor_convert import Tensor, check_tensor_parameters, read_inputs
from gateway.openai.options import completion_options, param_name
from gateway.openai.schemas import CompletionBody
from gateway.request.types import RequestOptions, TextPrompt
from gateway.request.violations import Violations, shortened
from quire.inference import open_inference_pb2 as pb

INPUTS = {
    "text_input": "BYTES",
    "stream": "BOOL",
    INPUT_NAME: "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
OUTPUTS = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "cumulative_logprob": "FP32",
    "logprobs": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}
# What is asked for by a BOOL input and comes back as an output of its own.
_OPTIONAL_OUTPUTS = tuple(name for name in OUTPUTS if name != "text_output")
_OF_LOGPROBS = ("cumulative_logprob", "logprobs")


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
        num_top: How many of the most likely tokens log probabilities tell besides the chosen one.
        raw: Whether tensors come and go as raw bytes.
        fields: What says where in the request things are.
    """

    id: str
    prompts: tuple[str, ...]
    options: tuple[RequestOptions, ...]
    streams: bool
    includes_input: bool
    outputs: frozenset[str]
    num_top: int
    raw: bool
    fields: "RequestFields"


@dataclass(frozen=True, slots=True)
class RequestFields:
    """Where in a request things are."""

    body: CompletionBody
    sampling: SamplingFields
    text_input: Tensor

    def path(self, position: int, field: str) -> str:
        """Where a field of the validator is, for the prompt at `position`."""
        name = param_name(self.body, field)
        return self.text_input.element(position) if name == "prompt" else self.sampling.path(name)


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
    if streams:
        _check_streaming(violations, inputs, in_stream=in_stream)
    outputs = _outputs(violations, request, flags)
    violations.raise_if_any()
    sampling = read_sampling_fields(request, inputs.get(INPUT_NAME))
    body = sampling.body()
    if streams and (body.n or 1) > 1:
        violations.add(sampling.path("n"), f"is {body.n}; a streamed request has one text")
    logprobs = _logprobs(violations, body, sampling, outputs)
    violations.raise_if_any()
    body = body.model_copy(update={"model": request.model_name, "logprobs": logprobs})
    return Inference(
        id=request.id,
        prompts=prompts,
        options=_options(body, prompts),
        streams=streams,
        includes_input=not streams and not flags["exclude_input_in_output"],
        outputs=outputs,
        num_top=logprobs or 0,
        raw=bool(request.raw_input_contents),
        fields=RequestFields(body, sampling, inputs["text_input"]),
    )


def _logprobs(
    violations: Violations, body: CompletionBody, sampling: SamplingFields, outputs: frozenset[str]
) -> int | None:
    """How many of the most likely tokens the generator is to report; None for no log probabilities at all."""
    if body.logprobs is not None and "logprobs" not in outputs:
        violations.add(sampling.path("logprobs"), "is set; the input return_logprobs brings what it asks for")
    return body.logprobs if outputs.isdisjoint(_OF_LOGPROBS) else body.logprobs or 0


def _options(body: CompletionBody, prompts: Sequence[str]) -> tuple[RequestOptions, ...]:
    """Those of all prompts, which have the same parameters, as one object."""
    # The protocol's id is the client's own and may be used twice at once, so the gateway makes the one it runs by.
    options = dataclasses.replace(completion_options(body, None, ""), request_id=None)
    return tuple(dataclasses.replace(options, prompt=TextPrompt(prompt)) for prompt in prompts)


def _prompts(violations: Violations, inputs: Mapping[str, Tensor]) -> tuple[str, ...]:
    tensor = inputs.get("text_input")
    if tensor is None:
        violations.add("inputs", "has no text_input")
        return ()
    return tuple(_text(violations, tensor, position) for position in range(len(tensor.values)))


def _text(violations: Violations, tensor: Tensor, position: int) -> str:
    try:
        return bytes(tensor.values[position]).decode()
    except UnicodeDecodeError:
        violations.add(tensor.element(position), "is not valid UTF-8")
        return ""


def _flag(violations: Violations, inputs: Mapping[str, Tensor], name: str) -> bool | None:
    """The one element of a BOOL input; None where it is absent."""
    tensor = inputs.get(name)
    if tensor is None:
        return None
    if len(tensor.values) != 1:
        violations.add(tensor.field, f"has {len(tensor.values):,} elements; {name} must have 1")
    return bool(tensor.values[0])


def _check_streaming(violations: Violations, inputs: Mapping[str, Tensor], *, in_stream: bool) -> None:
    if not in_stream:
        violations.add(inputs["stream"].element(0), "is true; ModelInfer answers once, use ModelStreamInfer")
    prompts = inputs.get("text_input")
    if prompts is not None and len(prompts.values) > 1:
        violations.add(prompts.field, f"has {len(prompts.values):,} prompts; a streamed request has 1")
    excluding = inputs.get("exclude_input_in_output")
    if excluding is not None and not excluding.values[0]:
        violations.add(excluding.element(0), "is false; a streamed text never has its prompt")


def _outputs(violations: Violations, request: pb.ModelInferRequest, flags: dict[str, bool | None]) -> frozenset[str]:
    for position, output in enumerate(request.outputs):
        field = f"outputs[{position}]"
        check_tensor_parameters(violations, field, output)
        if output.name not in OUTPUTS:
            known = ", ".join(OUTPUTS)
            violations.add(f"{field}.name", f'is "{shortened(output.name)}"; the outputs of this model are {known}')
    asked = {name for name in _OPTIONAL_OUTPUTS if flags[f"return_{name}"]}
    named = {output.name for output in request.outputs} or {"text_output"}
    return frozenset(named | asked)
