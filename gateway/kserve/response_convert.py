"""What was generated, as responses of the protocol."""

from collections.abc import Iterable, Sequence

from gateway.api.answers import as_json
from gateway.kserve.inference_convert import OUTPUTS, Inference
from gateway.kserve.tensor_convert import Element, add_output
from gateway.openai.logprobs import logprobs_by_token_id
from gateway.openai.token_text import TokenTexts
from gateway.replicas.events import Chunk, Finished, GeneratedSequence, PositionLogprobs, Usage
from quire.inference import open_inference_pb2 as pb

MODEL_VERSION = "1"
_FINAL = "triton_final_response"

Result = tuple[Sequence[GeneratedSequence], Usage]


class Responder:
    """Makes the responses to one request: `whole` alone, or `piece` for each chunk and `last` at the end."""

    def __init__(self, model: str, inference: Inference, texts: TokenTexts | None) -> None:
        """`texts` are needed where log probabilities are wanted."""
        self._model = model
        self._inference = inference
        self._texts = texts
        self._cumulative_logprob = 0.0

    def whole(self, results: Sequence[Result]) -> pb.ModelInferResponse:
        """All sequences of all prompts, prompt by prompt; `results` has one entry a prompt."""
        rows = [
            (prompt, sequence, usage)
            for prompt, (sequences, usage) in zip(self._inference.prompts, results, strict=True)
            for sequence in sequences
        ]
        before = [prompt if self._inference.includes_input else "" for prompt, _, _ in rows]
        sequences = [sequence for _, sequence, _ in rows]
        return self._response(
            {
                "text_output": [f"{text}{each.text}".encode() for text, each in zip(before, sequences, strict=True)],
                "finish_reason": [each.finished.reason.value.encode() for each in sequences],
                "cumulative_logprob": [_summed(each.logprobs) for each in sequences],
                "logprobs": [self._logprobs(each.logprobs) for each in sequences],
                "num_input_tokens": [usage.prompt_tokens for _, _, usage in rows],
                "num_output_tokens": [each.finished.num_tokens for each in sequences],
            }
        )

    def piece(self, chunk: Chunk) -> pb.ModelStreamInferResponse:
        """The next piece of a streamed text; the cumulative log probability is that of all pieces so far."""
        self._cumulative_logprob += _summed(chunk.logprobs)
        values: dict[str, list[Element]] = {
            "text_output": [chunk.text.encode()],
            "finish_reason": [b""],
            "cumulative_logprob": [self._cumulative_logprob],
            "logprobs": [self._logprobs(chunk.logprobs)],
            "num_input_tokens": [0],
            "num_output_tokens": [len(chunk.token_ids)],
        }
        return in_stream(self._response(values), is_final=False)

    def last(self, finished: Finished, usage: Usage) -> pb.ModelStreamInferResponse:
        """The end of a streamed text: no more text, but how it ended and what it cost."""
        values: dict[str, list[Element]] = {
            "text_output": [b""],
            "finish_reason": [finished.reason.value.encode()],
            "cumulative_logprob": [self._cumulative_logprob],
            "logprobs": [self._logprobs([])],
            "num_input_tokens": [usage.prompt_tokens],
            "num_output_tokens": [0],
        }
        return in_stream(self._response(values), is_final=True)

    def _logprobs(self, logprobs: Iterable[PositionLogprobs]) -> bytes:
        """Log probabilities as JSON: for each token an object of the chosen and the most likely ones, by token id."""
        if self._texts is None:
            return b""
        return as_json(logprobs_by_token_id(self._texts, logprobs, self._inference.num_top))

    def _response(self, values: dict[str, list[Element]]) -> pb.ModelInferResponse:
        inference = self._inference
        response = pb.ModelInferResponse(model_name=self._model, model_version=MODEL_VERSION, id=inference.id)
        for name, datatype in OUTPUTS.items():
            if name in inference.outputs:
                add_output(response, name, datatype, values[name], raw=inference.raw)
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
