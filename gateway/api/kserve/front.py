"""The Open Inference Protocol v2 of KServe, over gRPC and HTTP. The routes call the methods of the gRPC servicer, with
tensors as JSON."""

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, NotRequired, cast

from google.protobuf import json_format
from google.protobuf.message import Message
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope
from typing_extensions import TypedDict

from gateway.api.answer_parts import LOWEST
from gateway.api.answers import Dialect, ErrorAnswer, StreamedResponse, WholeResponse, as_json
from gateway.api.body import BodyLimits, load_json, max_entries, read_body, read_model, validated
from gateway.api.field_rule import FieldRule, Part
from gateway.api.front import Front, FrontContext
from gateway.api.kserve.inference import INPUTS, MAX_ELEMENTS, MAX_PARAMETERS, bytes_of, values_of_bytes
from gateway.api.kserve.inference_servicer import KServeServicer, UnservedMethods
from gateway.api.openapi import AnyObject, ApiRoute
from gateway.request.body_memory import count_answer
from gateway.request.violations import Violations, shortened
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import InvalidArgument

ROOT = "/v2"
_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_MAX_TENSORS = 64
_CONTENTS = re.compile(r"\.contents\.\w+_contents")
# A parameter of requests: outputs are binary data.
_BINARY_OUTPUT = "binary_data_output"
_BINARY_DATA, _BINARY_SIZE = "binary_data", "binary_data_size"
_BINARY = "application/octet-stream"
_MAX_DIGITS = 12
_BINARY_HEADER = "inference-header-content-length"
_UNION_TYPES = {
    "data": "a list of strings or a list of booleans, nested if the shape has two dimensions",
    "parameters": "an object whose values are strings, numbers or booleans",
}

# Description of the generate extension's stream, for its route.
_EVENTS: Mapping[str, Any] = {"answer": None, "media_type": "text/event-stream"}
Element = str | bool


Parameters = Annotated[dict[str, bool | int | float | str] | None, max_entries(MAX_PARAMETERS)]


class InputTensor(Part):
    """An input. `data` has the elements in row-major order, flat or nested. With the parameter `binary_data_size` the
    elements are that number of bytes after the JSON instead."""

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=8)]
    datatype: str
    parameters: Parameters = None
    data: Annotated[
        list[Element | Annotated[list[Element], Field(fail_fast=True, max_length=MAX_ELEMENTS)]],
        Field(fail_fast=True, max_length=MAX_ELEMENTS, default_factory=list),
    ]


class RequestedOutput(Part):
    name: str
    parameters: Parameters = None


class InferBody(Part):
    """An inference request. `parameters` are sampling parameters, with the names in the input `sampling_parameters`.
    The path names the model; clients of KServe also name it here."""

    union_types: ClassVar[Mapping[str, str]] = _UNION_TYPES

    id: str | None = None
    model_name: str | None = None
    model_version: str | None = None
    parameters: Parameters = None
    inputs: Annotated[list[InputTensor], Field(max_length=_MAX_TENSORS)]
    outputs: Annotated[list[RequestedOutput] | None, Field(max_length=_MAX_TENSORS)] = None


class GenerateBody(Part):
    """A request of Triton's generate extension. All other fields are inputs or sampling parameters, by name."""

    union_types: ClassVar[Mapping[str, str]] = _UNION_TYPES

    id: str | None = None
    text_input: str
    parameters: Parameters = None


class IndexBody(Part):
    ready: bool | None = None


class InferenceServer(TypedDict):
    name: str
    version: str
    extensions: list[str]


class Liveness(TypedDict):
    live: bool


class Readiness(TypedDict):
    ready: bool


class ModelReadiness(Readiness):
    name: str


class TensorMetadata(TypedDict):
    name: str
    datatype: str
    shape: list[int]


class InferenceModel(TypedDict):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class OutputTensor(TensorMetadata):
    data: list[str | float | int | bool]


class InferenceAnswer(TypedDict):
    model_name: str
    model_version: str
    id: NotRequired[str]
    outputs: list[OutputTensor]


class InferenceError(TypedDict):
    """An error in the protocol's form."""

    error: str


def open_front(context: FrontContext) -> Front:
    """Opens the front. All routes need a key if the gateway has keys, like the gRPC methods."""
    servicer = KServeServicer(context.models, context.body_limits.rule)
    return Front(
        routes=_routes(_KServeRoutes(servicer, context.body_limits, context.keep_alive_s)),
        servicers={_SERVICE: servicer},
        handlers=[UnservedMethods(_SERVICE)],
        dialect_of=_dialect_of,
    )


def _dialect_of(scope: Scope) -> Dialect | None:
    path = scope["path"]
    return DIALECT if path == ROOT or path.startswith(f"{ROOT}/") else None


def _routes(routes: "_KServeRoutes") -> list[ApiRoute]:
    return [
        _route(ROOT, routes.server),
        _route("/v2/health/live", routes.live),
        _route("/v2/health/ready", routes.ready, answer=Readiness, statuses=[503]),
        _route("/v2/models/stats", routes.statistics),
        _route("/v2/repository/index", routes.index, method="POST", body=IndexBody),
        *(
            route
            # The name of a model may have slashes, so the longer paths come first.
            for path in ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")
            for route in (
                _route(f"{path}/infer", routes.infer, method="POST", body=InferBody, answer=InferenceAnswer),
                _route(f"{path}/generate", routes.generate, method="POST", body=GenerateBody, answer=AnyObject),
                _route(f"{path}/generate_stream", routes.generate_stream, method="POST", body=GenerateBody, **_EVENTS),
                _route(f"{path}/ready", routes.model_ready, answer=ModelReadiness, statuses=[503]),
                _route(f"{path}/config", routes.config),
                _route(f"{path}/stats", routes.statistics),
                _route(path, routes.model),
            )
        ),
    ]


class _KServeRoutes:
    def __init__(self, servicer: KServeServicer, body_limits: BodyLimits, keep_alive_s: float) -> None:
        self._servicer = servicer
        self._body_limits = body_limits
        self._keep_alive_s = keep_alive_s

    async def server(self, request: Request) -> InferenceServer:
        """The name and the version of the server."""
        metadata = await self._servicer.ServerMetadata(pb.ServerMetadataRequest(), None)
        return {"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)}

    async def live(self, request: Request) -> Liveness:
        """Whether the server runs."""
        answer = await self._servicer.ServerLive(pb.ServerLiveRequest(), None)
        return {"live": answer.live}

    async def ready(self, request: Request) -> Response:
        """Whether a request would run at once."""
        answer = await self._servicer.ServerReady(pb.ServerReadyRequest(), None)
        return JSONResponse(Readiness(ready=answer.ready), 200 if answer.ready else 503)

    async def model(self, request: Request) -> InferenceModel:
        """The tensors of a model."""
        metadata = await self._servicer.ModelMetadata(pb.ModelMetadataRequest(**_model(request)), None)
        return {
            "name": metadata.name,
            "versions": list(metadata.versions),
            "platform": metadata.platform,
            "inputs": list(map(_tensor_json, metadata.inputs)),
            "outputs": list(map(_tensor_json, metadata.outputs)),
        }

    async def model_ready(self, request: Request) -> Response:
        """Whether a request for a model would run at once."""
        answer = await self._servicer.ModelReady(pb.ModelReadyRequest(**_model(request)), None)
        # Raises NotFound for another model, as on all other paths.
        metadata = await self._servicer.ModelMetadata(pb.ModelMetadataRequest(**_model(request)), None)
        found = ModelReadiness(name=metadata.name, ready=answer.ready)
        return JSONResponse(found, 200 if answer.ready else 503)

    async def infer(self, request: Request) -> Response:
        """Continues one or several prompts; gives the vectors of texts, or the scores of documents for a query."""
        data = await read_body(request, self._body_limits, media_types=(_BINARY,))
        data, binary = _parts(data, request)
        body = validated(InferBody, await load_json(data, self._body_limits))
        asked = _request_message(body, request, self._body_limits.rule, binary)
        headers: dict[str, str] = {}

        async def make() -> AsyncGenerator[bytes, None]:
            response = await self._servicer.ModelInfer(asked, None)
            # In a thread, since it may have a thousand long texts.
            answer, size = await asyncio.to_thread(_answer, response, _binary_outputs(body))
            count_answer(len(answer))
            if size is not None:
                headers.update({_BINARY_HEADER: str(size), "content-type": _BINARY})
            yield answer

        return WholeResponse(make, headers, DIALECT)

    async def generate(self, request: Request) -> Response:
        """Continues one prompt, in the form of Triton's generate extension."""
        self._servicer.check_generates(**_model(request))
        asked = await _generate_message(request, self._body_limits, streams=False)

        async def make() -> AsyncGenerator[bytes, None]:
            response = await self._servicer.ModelInfer(asked, None)
            answer = await asyncio.to_thread(lambda: as_json(_generated_json(response)))
            count_answer(len(answer))
            yield answer

        return WholeResponse(make, {}, DIALECT)

    async def generate_stream(self, request: Request) -> Response:
        """Continues one prompt as a stream of server-sent events, one for each piece of the text."""
        self._servicer.check_generates(**_model(request))
        asked = await _generate_message(request, self._body_limits, streams=True)

        async def make(_: StreamedResponse) -> AsyncGenerator[bytes, None]:
            async with aclosing(self._servicer.answer(asked)) as pieces:
                async for piece in pieces:
                    yield DIALECT.event(_generated_json(piece.infer_response))

        return StreamedResponse(make, lambda: True, self._keep_alive_s, {}, DIALECT)

    async def config(self, request: Request) -> AnyObject:
        """The model's configuration in Triton's form."""
        answer = await self._servicer.ModelConfig(pb.ModelConfigRequest(**_model(request)), None)
        return _plain(answer.config)

    async def statistics(self, request: Request) -> AnyObject:
        """The number and the durations of inferences, for operators."""
        named = _model(request) if "model" in request.path_params else {}
        return _plain(await self._servicer.ModelStatistics(pb.ModelStatisticsRequest(**named), None))

    async def index(self, request: Request) -> list[AnyObject]:
        """The served models."""
        data = await read_body(request, self._body_limits)
        body = validated(IndexBody, {} if not data else await load_json(data, self._body_limits))
        answer = await self._servicer.RepositoryIndex(pb.RepositoryIndexRequest(ready=bool(body.ready)), None)
        return [_plain(each) for each in answer.models]


def _route(path: str, endpoint: Callable[..., Any], **fields: Any) -> ApiRoute:
    return ApiRoute(path, endpoint, error=InferenceError, **fields)


def _model(request: Request) -> dict[str, str]:
    return {"name": request.path_params["model"], "version": request.path_params.get("version", "")}


def _parts(data: bytes, request: Request) -> tuple[bytes, bytes]:
    """Splits a body into its JSON and the bytes after it."""
    stated = request.headers.get(_BINARY_HEADER)
    if stated is None:
        return data, b""
    if not stated.isdecimal() or not stated.isascii() or len(stated) > _MAX_DIGITS or int(stated) > len(data):
        shown = shortened(stated)
        raise InvalidArgument(f'{_BINARY_HEADER} is "{shown}"; it must be the bytes of JSON, of {len(data):,} in all')
    return data[: int(stated)], data[int(stated) :]


def _binary_outputs(body: InferBody) -> Callable[[str], bool]:
    """A function that returns whether an output is sent as binary data."""
    by_default = (body.parameters or {}).get(_BINARY_OUTPUT) is True
    asked = {each.name: (each.parameters or {}).get(_BINARY_DATA, by_default) is True for each in body.outputs or ()}
    return lambda name: asked.get(name, by_default)


def _answer(response: pb.ModelInferResponse, is_binary: Callable[[str], bool]) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if binary data follows."""
    answer = _response_json(response)
    behind: list[bytes] = []
    for output, tensor in zip(answer["outputs"], response.outputs, strict=True):
        if is_binary(tensor.name):
            values = bytes_of(tensor.datatype, _elements(tensor.contents))
            shown = cast(dict[str, Any], output)
            del shown["data"]
            shown["parameters"] = {_BINARY_SIZE: len(values)}
            behind.append(values)
    head = as_json(answer)
    return head + b"".join(behind), len(head) if behind else None


async def _generate_message(request: Request, limits: BodyLimits, *, streams: bool) -> pb.ModelInferRequest:
    """The message of a generate request: fields and `parameters` that are not inputs become parameters."""
    body = await read_model(GenerateBody, request, limits)
    flags: dict[str, Any] = {"exclude_input_in_output": True}
    named = {**(body.parameters or {}), **body.undeclared}
    # The path decides whether it streams. Examples of TensorRT-LLM send empty texts for empty lists of words.
    own = {name: value for name, value in named.items() if value not in (None, "") and name != "stream"}
    flags |= {name: own.pop(name) for name, datatype in INPUTS.items() if datatype == "BOOL" and name in own}
    if streams:
        flags["stream"] = True
    inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [body.text_input]}]
    inputs += [{"name": name, "datatype": "BOOL", "shape": [1], "data": [value]} for name, value in flags.items()]
    fields = {"id": body.id, "parameters": own, "inputs": inputs}
    return _request_message(validated(InferBody, fields), request, limits.rule, b"")


def _generated_json(response: pb.ModelInferResponse) -> dict[str, Any]:
    """An answer of the generate extension: an output with one element is written as that element."""
    head = {"model_name": response.model_name, "model_version": response.model_version}
    outputs = {each.name: _data(each.contents) for each in response.outputs}
    own = {name: data[0] if len(data) == 1 else data for name, data in outputs.items()}
    return head | ({"id": response.id} if response.id else {}) | own


def _plain(message: Message) -> AnyObject:
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


def _request_message(body: InferBody, request: Request, rule: FieldRule, binary: bytes) -> pb.ModelInferRequest:
    """The request as a message; `binary` has the elements that are not in the JSON.

    Raises:
        InvalidArgument: an element is not of the tensor's datatype, or a number is too large.
    """
    violations = Violations()
    rule.check(violations, body, "kserve")
    target = _model(request)
    for field, named in (("name", body.model_name), ("version", body.model_version)):
        if named and named != (target[field] or named):
            violations.add(f"model_{field}", f'is "{shortened(named)}"; the path has "{shortened(target[field])}"')
    tensors: list[pb.ModelInferRequest.InferInputTensor] = []
    for place, tensor in enumerate(body.inputs):
        size = (tensor.parameters or {}).get(_BINARY_SIZE)
        if tensor.data or not isinstance(size, int) or isinstance(size, bool):
            tensors.append(_tensor(violations, f"inputs[{place}]", tensor, None))
        elif 0 <= size <= len(binary):
            tensors.append(_tensor(violations, f"inputs[{place}]", tensor, binary[:size]))
            binary = binary[size:]
        else:
            violations.add(f"inputs[{place}].parameters", f"has {_BINARY_SIZE} {size}; {len(binary):,} bytes are left")
    if binary and not violations.found:
        violations.add("inputs", f"do not use {len(binary):,} bytes of the binary data after the JSON")
    own = {name: value for name, value in (body.parameters or {}).items() if name != _BINARY_OUTPUT}
    message = pb.ModelInferRequest(
        model_name=target["name"],
        model_version=target["version"] or body.model_version or "",
        id=body.id or "",
        inputs=tensors,
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


def _tensor(
    violations: Violations, field: str, tensor: InputTensor, binary: bytes | None
) -> pb.ModelInferRequest.InferInputTensor:
    """An input as a message. `binary` has its elements; None if they are in the JSON."""
    elements: Sequence[bytes | bool] = ()
    if binary is None:
        values = [value for each in tensor.data for value in (each if isinstance(each, list) else [each])]
        expected = bool if tensor.datatype == "BOOL" else str
        wrong = next((place for place, value in enumerate(values) if not isinstance(value, expected)), None)
        if wrong is not None:
            wanted = "true or false" if expected is bool else "a string"
            violations.add(f"{field}.data[{wrong}]", f"must be {wanted} in a tensor of {tensor.datatype}")
        elements = [value if isinstance(value, bool) else value.encode() for value in values]
    elif (found := values_of_bytes(tensor.datatype, binary)) is not None:
        elements = found
    else:
        violations.add(field, f"has bytes that are not a sequence of elements of {shortened(tensor.datatype)}")
    contents = pb.InferTensorContents(
        bool_contents=[each for each in elements if isinstance(each, bool)],
        bytes_contents=[each for each in elements if not isinstance(each, bool)],
    )
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


def _tensor_json(
    tensor: pb.ModelMetadataResponse.TensorMetadata | pb.ModelInferResponse.InferOutputTensor,
) -> TensorMetadata:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _response_json(response: pb.ModelInferResponse) -> InferenceAnswer:
    answer: InferenceAnswer = {
        "model_name": response.model_name,
        "model_version": response.model_version,
        "outputs": [{**_tensor_json(each), "data": _data(each.contents)} for each in response.outputs],
    }
    if response.id:
        answer["id"] = response.id
    return answer


def _data(contents: pb.InferTensorContents) -> list[Any]:
    """The elements in JSON."""
    elements = _elements(contents)
    return [each.decode() if isinstance(each, bytes) else each if math.isfinite(each) else LOWEST for each in elements]


def _elements(contents: pb.InferTensorContents) -> Sequence[bytes | float | int]:
    """The elements. Only one of the lists is used, since a tensor has one datatype."""
    return list(contents.bytes_contents) or list(contents.fp32_contents) or list(contents.uint_contents)


def _protocol_error(answer: ErrorAnswer) -> InferenceError:
    """An error in the protocol's form: only its message, with the body's paths of fields."""
    return {"error": _CONTENTS.sub(".data", answer.message)}


DIALECT = Dialect(_protocol_error, says_done=False)
"""The dialect of errors on all paths below `ROOT`."""
