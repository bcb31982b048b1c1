"""The Open Inference Protocol v2 over HTTP, with tensors as JSON: the methods of the gRPC servicer under paths."""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.api.answers import (
    Dialect,
    ErrorAnswer,
    HttpError,
    WholeResponse,
    as_json,
    error_answer,
    error_response,
)
from gateway.api.body import BodyLimits, max_entries, read_model
from gateway.api.field_rule import FieldRule, Part
from gateway.api.kserve.inference import MAX_ELEMENTS, MAX_PARAMETERS
from gateway.api.kserve.servicer import KServeServicer
from gateway.api.openai.write import LOWEST
from gateway.api.openapi import ApiRoute
from gateway.api.shapes import (
    InferenceAnswer,
    InferenceModel,
    InferenceServer,
    Liveness,
    ModelReadiness,
    Readiness,
)
from gateway.request.violations import Violations, shortened
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import InvalidArgument, QuireError

_MAX_TENSORS = 64
_CONTENTS = re.compile(r"\.contents\.\w+_contents")
# A parameter of requests: outputs as bytes. They are JSON here, which such clients read as well.
_BINARY_OUTPUT = "binary_data_output"
_BINARY_HEADER = "inference-header-content-length"
_UNION_TYPES = {
    "data": "a list of strings or a list of booleans, in lists of their own if the shape has two dimensions",
    "parameters": "an object whose values are strings, numbers or booleans",
}

Element = str | bool


Parameters = Annotated[dict[str, bool | int | float | str] | None, max_entries(MAX_PARAMETERS)]


class InputTensor(Part):
    """`data` are the elements in row-major order, flat or nested."""

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=8)]
    datatype: str
    parameters: Parameters = None
    data: Annotated[
        list[Element | Annotated[list[Element], Field(fail_fast=True, max_length=MAX_ELEMENTS)]],
        Field(fail_fast=True, max_length=MAX_ELEMENTS),
    ]


class RequestedOutput(Part):
    name: str
    parameters: Parameters = None


class InferBody(Part):
    """`parameters` are those of sampling, by their names in the input `sampling_parameters`. The path names the model;
    clients of KServe name it here, too."""

    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    parameters: Parameters = None
    inputs: Annotated[list[InputTensor], Field(max_length=_MAX_TENSORS)]
    outputs: Annotated[list[RequestedOutput] | None, Field(max_length=_MAX_TENSORS)] = None


class InferenceError(BaseModel):
    """An error in the protocol's shape."""

    error: str


def kserve_routes(servicer: KServeServicer, body_limits: BodyLimits) -> list[ApiRoute]:
    """All paths need a key if the gateway has keys, as the methods over gRPC do."""

    async def server(request: Request) -> Response:
        """The name and the version of the server."""
        metadata = await servicer.ServerMetadata(pb.ServerMetadataRequest(), None)
        return JSONResponse({"name": metadata.name, "version": metadata.version, "extensions": []})

    async def live(request: Request) -> Response:
        """Whether the server runs."""
        answer = await servicer.ServerLive(pb.ServerLiveRequest(), None)
        return JSONResponse({"live": answer.live})

    async def ready(request: Request) -> Response:
        """Whether a request would run at once."""
        answer = await servicer.ServerReady(pb.ServerReadyRequest(), None)
        return JSONResponse({"ready": answer.ready}, 200 if answer.ready else 503)

    async def model(request: Request) -> Response:
        """The tensors of a model."""
        asked = pb.ModelMetadataRequest(**_model(request))
        return await _answered(lambda: servicer.ModelMetadata(asked, None), _metadata_json)

    async def model_ready(request: Request) -> Response:
        """Whether a request for a model would run at once."""
        asked = pb.ModelMetadataRequest(**_model(request))
        answer = await servicer.ModelReady(pb.ModelReadyRequest(**_model(request)), None)
        # Another model is not found, as on all other paths.
        return await _answered(
            lambda: servicer.ModelMetadata(asked, None),
            lambda metadata: {"name": metadata.name, "ready": answer.ready},
            200 if answer.ready else 503,
        )

    async def infer(request: Request) -> Response:
        """The text that follows one or several prompts."""
        try:
            _check_not_binary(request)
            body = await read_model(InferBody, request, body_limits, _UNION_TYPES)
            asked = _request_message(body, request, body_limits.rule)
        except (HttpError, QuireError) as error:
            return error_response(error_answer(error, str), _DIALECT)

        async def make() -> AsyncGenerator[bytes, None]:
            response = await servicer.ModelInfer(asked, None)
            # It may have a thousand long texts.
            yield await asyncio.to_thread(lambda: as_json(_response_json(response)))

        return WholeResponse(make, str, {}, _DIALECT)

    return [
        _route("/v2", server, answer=InferenceServer),
        _route("/v2/health/live", live, answer=Liveness),
        _route("/v2/health/ready", ready, answer=Readiness, statuses=[503]),
        *(
            route
            # The name of a model may have slashes, so the longer paths come first.
            for path in ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")
            for route in (
                _route(f"{path}/infer", infer, method="POST", body=InferBody, answer=InferenceAnswer),
                _route(f"{path}/ready", model_ready, answer=ModelReadiness, statuses=[503]),
                _route(path, model, answer=InferenceModel),
            )
        ),
    ]


def _route(path: str, endpoint: Callable[..., Any], **fields: Any) -> ApiRoute:
    return ApiRoute(path, endpoint, error=InferenceError, **fields)


def _model(request: Request) -> dict[str, str]:
    return {"name": request.path_params["model"], "version": request.path_params.get("version", "")}


def _check_not_binary(request: Request) -> None:
    if _BINARY_HEADER in request.headers:
        raise InvalidArgument(
            f"the header {_BINARY_HEADER} is set; elements of tensors are JSON here (binary_data=False in "
            "tritonclient), or as raw bytes over gRPC"
        )


def _request_message(body: InferBody, request: Request, rule: FieldRule) -> pb.ModelInferRequest:
    """The same request as a message.

    Raises:
        InvalidArgument: an element is not of the tensor's datatype, or a number is too large.
    """
    violations = Violations()
    rule.check(violations, body, "kserve")
    target = _model(request)
    for field, named in (("name", body.model_name), ("version", body.model_version)):
        if named and named != (target[field] or named):
            violations.add(f"model_{field}", f'is "{shortened(named)}"; the path has "{shortened(target[field])}"')
    own = {name: value for name, value in (body.parameters or {}).items() if name != _BINARY_OUTPUT}
    message = pb.ModelInferRequest(
        model_name=target["name"],
        model_version=target["version"] or body.model_version or "",
        id=body.id or "",
        inputs=[_tensor(violations, f"inputs[{place}]", tensor) for place, tensor in enumerate(body.inputs)],
        outputs=[
            pb.ModelInferRequest.InferRequestedOutputTensor(
                name=output.name, parameters=_parameters(violations, f"outputs[{place}].", output.parameters)
            )
            for place, output in enumerate(body.outputs or ())
        ],
        parameters=_parameters(violations, "", own),
    )
    violations.raise_if_any()
    return message


def _tensor(violations: Violations, field: str, tensor: InputTensor) -> pb.ModelInferRequest.InferInputTensor:
    values = [value for each in tensor.data for value in (each if isinstance(each, list) else [each])]
    contents = pb.InferTensorContents()
    expected = bool if tensor.datatype == "BOOL" else str
    for place, value in enumerate(values):
        if not isinstance(value, expected):
            wanted = "true or false" if expected is bool else "a string"
            violations.add(f"{field}.data[{place}]", f"must be {wanted} in a tensor of {tensor.datatype}")
            break
    else:
        if expected is bool:
            contents.bool_contents.extend(bool(value) for value in values)
        else:
            contents.bytes_contents.extend(str(value).encode() for value in values)
    return pb.ModelInferRequest.InferInputTensor(
        name=tensor.name,
        datatype=tensor.datatype,
        shape=tensor.shape,
        parameters=_parameters(violations, f"{field}.", tensor.parameters),
        contents=contents,
    )


def _parameters(violations: Violations, prefix: str, parameters: Parameters) -> dict[str, pb.InferParameter]:
    found: dict[str, pb.InferParameter] = {}
    for name, value in (parameters or {}).items():
        match value:
            case bool():
                found[name] = pb.InferParameter(bool_param=value)
            case int() if -(2**63) <= value < 2**63:
                found[name] = pb.InferParameter(int64_param=value)
            case int() if 0 <= value < 2**64:
                found[name] = pb.InferParameter(uint64_param=value)
            case int():
                violations.add(f'{prefix}parameters["{name[:80]}"]', "is an integer of more than 64 bits")
            case float():
                found[name] = pb.InferParameter(double_param=value)
            case str():
                found[name] = pb.InferParameter(string_param=value)
    return found


def _metadata_json(metadata: pb.ModelMetadataResponse) -> dict[str, Any]:
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": _tensors_json(metadata.inputs),
        "outputs": _tensors_json(metadata.outputs),
    }


def _tensors_json(tensors: Sequence[pb.ModelMetadataResponse.TensorMetadata]) -> list[dict[str, Any]]:
    return [{"name": each.name, "datatype": each.datatype, "shape": list(each.shape)} for each in tensors]


def _response_json(response: pb.ModelInferResponse) -> dict[str, Any]:
    head = {"model_name": response.model_name, "model_version": response.model_version}
    outputs = [
        {"name": each.name, "datatype": each.datatype, "shape": list(each.shape), "data": _data(each.contents)}
        for each in response.outputs
    ]
    return head | ({"id": response.id} if response.id else {}) | {"outputs": outputs}


def _data(contents: pb.InferTensorContents) -> list[Any]:
    """The elements; a tensor has one datatype."""
    texts = [value.decode() for value in contents.bytes_contents]
    numbers = [value if math.isfinite(value) else LOWEST for value in contents.fp32_contents]
    return texts or numbers or list(contents.uint_contents)


def _protocol_error(answer: ErrorAnswer) -> dict[str, Any]:
    """An error in the protocol's shape: its message alone, with the paths of fields in the body."""
    return InferenceError(error=_CONTENTS.sub(".data", answer.message)).model_dump()


_DIALECT = Dialect(_protocol_error)


async def _answered(
    call: Callable[[], Awaitable[Any]], to_json: Callable[[Any], Mapping[str, Any]], status: int = 200
) -> Response:
    try:
        return JSONResponse(to_json(await call()), status)
    except QuireError as error:
        return error_response(error_answer(error, str), _DIALECT)
