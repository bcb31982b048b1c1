"""What was generated, as responses of the protocol."""

from collections.abc import Sequence

from gateway.events import Finished, GeneratedSequence, Usage
from gateway.kserve.inference_convert import OUTPUTS, Inference
from gateway.kserve.tensor_convert import add_output
from quire.inference import open_inference_pb2 as pb

MODEL_VERSION = "1"
_FINAL = "triton_final_response"

Result = tuple[Sequence[GeneratedSequence], Usage]


def whole_response(model: str, inference: Inference, results: Sequence[Result]) -> pb.ModelInferResponse:
    """All sequences of all prompts, prompt by prompt; `results` has one entry a prompt."""
    rows = [
        (prompt, sequence, usage)
        for prompt, (sequences, usage) in zip(inference.prompts, results, strict=True)
        for sequence in sequences
    ]
    values: dict[str, list[bytes | int]] = {
        "text_output": [
            ((prompt if inference.includes_input else "") + sequence.text).encode() for prompt, sequence, _ in rows
        ],
        "finish_reason": [sequence.finished.reason.value.encode() for _, sequence, _ in rows],
        "num_input_tokens": [usage.prompt_tokens for _, _, usage in rows],
        "num_output_tokens": [sequence.finished.num_tokens for _, sequence, _ in rows],
    }
    return _response(model, inference, values)


def piece_response(
    model: str, inference: Inference, text: str, num_tokens: int, usage: Usage | None, finished: Finished | None
) -> pb.ModelInferResponse:
    """A piece of a streamed text, of `num_tokens` tokens; the last one has the usage and how the sequence finished."""
    values: dict[str, list[bytes | int]] = {
        "text_output": [text.encode()],
        "finish_reason": [b"" if finished is None else finished.reason.value.encode()],
        "num_input_tokens": [0 if usage is None else usage.prompt_tokens],
        "num_output_tokens": [num_tokens],
    }
    return _response(model, inference, values)


def in_stream(response: pb.ModelInferResponse, *, is_final: bool) -> pb.ModelStreamInferResponse:
    response.parameters[_FINAL].bool_param = is_final
    return pb.ModelStreamInferResponse(infer_response=response)


def error_response(model: str, request_id: str, message: str) -> pb.ModelStreamInferResponse:
    """The last response to a request that failed."""
    head = pb.ModelInferResponse(model_name=model, id=request_id)
    response = in_stream(head, is_final=True)
    response.error_message = message
    return response


def _response(model: str, inference: Inference, values: dict[str, list[bytes | int]]) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name=model, model_version=MODEL_VERSION, id=inference.id)
    for name, datatype in OUTPUTS.items():
        if name in inference.outputs:
            add_output(response, name, datatype, values[name], raw=inference.raw)
    return response
