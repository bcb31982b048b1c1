"""Vectors and scores as tensors: requests of models that give vectors, and of models that rank documents."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gateway.api import field_rule
from gateway.api.field_rule import FieldRule, Unread
from gateway.api.generation_fields import Body
from gateway.api.kserve.inference import (
    INPUTS,
    MODEL_VERSION,
    OUTPUTS,
    SamplingFields,
    Tensor,
    check_outputs,
    read_inputs,
    read_sampling_fields,
    texts_of,
)
from gateway.request.generator import Generator
from gateway.request.served_model import ServedModel
from gateway.request.vectors import VectorCall, requests_for_pairs, requests_for_texts, run_vectors
from gateway.request.violations import Violations, renaming
from gateway.types import ModelKind
from quire.inference import open_inference_pb2 as pb

_NUM_TOKENS = "num_input_tokens"


@dataclass(frozen=True, slots=True)
class Signature:
    """The tensors of a model: datatypes by name. `vector_size` is the second dimension of `embedding`."""

    inputs: dict[str, str]
    outputs: dict[str, str]
    required: frozenset[str]
    vector_size: int = 0

    @classmethod
    def of(cls, model: ServedModel) -> "Signature":
        match model.kind:
            case ModelKind.TEXT:
                return cls(INPUTS, OUTPUTS, frozenset({"text_input"}))
            case ModelKind.VECTORS:
                inputs, output = {"text_input": "BYTES"}, "embedding"
            case ModelKind.SCORES:
                inputs, output = {"query": "BYTES", "documents": "BYTES"}, "scores"
        return cls(inputs, {output: "FP32", _NUM_TOKENS: "UINT32"}, frozenset(inputs), model.vector_size)

    def shape(self, name: str) -> list[int]:
        """The dimensions of a tensor; -1 is any size."""
        return {"embedding": [-1, self.vector_size], "query": [1]}.get(name, [-1])


class _RankingParameters(Body):
    """Parameters of a request for scores."""

    api: ClassVar[str] = "kserve"
    unread: ClassVar[Unread] = field_rule.RANKING

    truncate: bool | None = None
    priority: int | None = None


class _EmbeddingParameters(_RankingParameters):
    """Parameters of a request for vectors."""

    unread: ClassVar[Unread] = field_rule.EMBEDDINGS

    dimensions: int | None = None
    prompt_name: str | None = None


async def infer_vectors(generator: Generator, request: pb.ModelInferRequest, rule: FieldRule) -> pb.ModelInferResponse:
    """The answer of a model that gives vectors or scores.

    Raises:
        QuireError: a tensor or a parameter is wrong, or one of the texts failed.
    """
    signature, violations = Signature.of(generator.model), Violations()
    inputs = read_inputs(request, signature.inputs)
    texts = {name: texts_of(violations, inputs, name) for name in signature.inputs}
    is_ranking = "query" in texts
    if is_ranking and len(texts["query"]) > 1:
        violations.add(inputs["query"].field, f"has {len(texts['query']):,} elements; query must have 1")
    named = check_outputs(violations, request, signature.outputs)
    violations.raise_if_any()
    fields = read_sampling_fields(request, None)
    call = _call_of(fields.body(rule, _RankingParameters if is_ranking else _EmbeddingParameters), request.model_name)
    with renaming(lambda: fields.path):
        if is_ranking:
            pairs = [(query, each) for query in texts["query"] for each in texts["documents"]]
            requests = await requests_for_pairs(generator, pairs, call)
        else:
            requests = requests_for_texts(generator, texts["text_input"], call)
    names = partial(_names, fields, inputs["documents" if is_ranking else "text_input"])
    found = await run_vectors(generator, requests, names, call)
    main, num_tokens = signature.outputs
    vectors = np.stack(found.vectors)
    numbers = {main: vectors[:, 0] if is_ranking else vectors, num_tokens: np.array(found.num_tokens, np.uint32)}
    response = pb.ModelInferResponse(model_name=request.model_name, model_version=MODEL_VERSION, id=request.id)
    for name in signature.outputs:
        if name in (named or {main}):
            _add_output(response, name, numbers[name], is_raw=bool(request.raw_input_contents))
    return response


def _call_of(body: _RankingParameters, model: str) -> VectorCall:
    call = VectorCall(model, body.priority, priority_sign=-1, truncate=bool(body.truncate))
    if isinstance(body, _EmbeddingParameters):
        return replace(call, dimensions=body.dimensions, prompt_name=body.prompt_name)
    return call


def _names(fields: SamplingFields, texts: Tensor, position: int) -> Callable[[str], str]:
    """Maps fields of the validator, for the text at `position`, to paths in the request."""

    def path(field: str) -> str:
        is_text = field.split(".")[0] in ("text", "token_ids", "prompt")
        return texts.element(position) if is_text else fields.path(field)

    return path


def _add_output(response: pb.ModelInferResponse, name: str, values: NDArray[Any], *, is_raw: bool) -> None:
    is_float = values.dtype == np.float32
    output = response.outputs.add(name=name, datatype="FP32" if is_float else "UINT32", shape=values.shape)
    if is_raw:
        response.raw_output_contents.append(values.tobytes())
    else:
        contents = output.contents.fp32_contents if is_float else output.contents.uint_contents
        contents.extend(values.ravel().tolist())
