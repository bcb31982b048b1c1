"""The service inference.GRPCInferenceService, implemented by the generator.

A stream carries many requests, which run concurrently; their responses are interleaved. Errors for Triton's methods
that this server does not have name the alternative.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from gateway.api.field_rule import FieldRule
from gateway.api.kserve.inference import (
    MODEL_VERSION,
    Inference,
    Responder,
    error_response,
    in_stream,
    read_inference,
)
from gateway.api.kserve.vectors import Signature, infer_vectors
from gateway.auth.caller import current_caller
from gateway.metrics import RequestStatistics
from gateway.replicas.events import Chunk, Completed, Finished
from gateway.request.answer_memory import AS_TENSORS, STREAMED
from gateway.request.body_memory import keep_memory
from gateway.request.generator import Generator, answer, running
from gateway.request.models import Models
from gateway.request.violations import renamed, shortened
from gateway.types import ModelKind, RequestOptions
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import NotFound, PermissionDenied, QuireError, Unimplemented
from quire.service.histograms import Distribution
from quire.version import VERSION

Context = grpc.aio.ServicerContext
_logger = logging.getLogger(__name__)
Request = TypeVar("Request")
Response = TypeVar("Response")

_PLATFORM = "quire"
_DATA_TYPES = {
    "BOOL": pb.TYPE_BOOL,
    "BYTES": pb.TYPE_STRING,
    "FP32": pb.TYPE_FP32,
    "UINT32": pb.TYPE_UINT32,
}
# Maximum running requests of a stream. The next request is read after one of them is answered.
MAX_RUNNING = 64
_SHARED_MEMORY = "elements of tensors are sent in the messages"
_FIXED = "the server only serves the model that it was started with"
# Triton's names; binary_tensor_data and generate are of the HTTP port.
_EXTENSIONS = ("binary_tensor_data", "generate", "model_configuration", "parameters", "statistics")
_WAYS_OUT: Mapping[str, str] = {
    "RepositoryModelLoad": _FIXED,
    "RepositoryModelUnload": _FIXED,
    **{f"SystemSharedMemory{each}": _SHARED_MEMORY for each in ("Status", "Register", "Unregister")},
    **{f"CudaSharedMemory{each}": _SHARED_MEMORY for each in ("Status", "Register", "Unregister")},
}


class KServeServicer:
    """The service; protos/inference/open_inference.proto specifies each method. Methods that are also served over HTTP
    do not need a context."""

    def __init__(self, models: Models, rule: FieldRule | None = None) -> None:
        """`rule` decides about unknown parameters."""
        self.rule = FieldRule() if rule is None else rule
        self._models = models

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context | None) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context | None) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._models.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context | None) -> pb.ModelReadyResponse:
        is_served = self._models.violation(request.name) is None and _is_version(request.version)
        return pb.ModelReadyResponse(ready=is_served and self._models.named(request.name).is_ready)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context | None
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="quire", version=VERSION, extensions=_EXTENSIONS)

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context | None
    ) -> pb.ModelMetadataResponse:
        signature = Signature.of(self._target(request.name, request.version).model)
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[MODEL_VERSION],
            platform=_PLATFORM,
            inputs=_tensors(signature, signature.inputs),
            outputs=_tensors(signature, signature.outputs),
        )

    async def ModelConfig(self, request: pb.ModelConfigRequest, context: Context | None) -> pb.ModelConfigResponse:
        signature = Signature.of(self._target(request.name, request.version).model)
        return pb.ModelConfigResponse(config=_model_config(request.name, signature))

    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, context: Context | None
    ) -> pb.ModelStatisticsResponse:
        if not current_caller().access.is_operator:
            raise PermissionDenied("statistics are for the API keys of operators", reason="OPERATORS_ONLY")
        named = [self._target(request.name, request.version)] if request.name else None
        _check_version("version", request.version)
        response = pb.ModelStatisticsResponse()
        for each in named or self._models:
            name = each.model.name
            if each.adapters.visible(current_caller(), name) is not None:
                response.model_stats.append(_model_statistics(name, each.metrics.statistics))
        return response

    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: Context | None
    ) -> pb.RepositoryIndexResponse:
        if request.repository_name:
            shown = shortened(request.repository_name)
            raise NotFound(f'repository_name is "{shown}"; the one repository has no name')
        response = pb.RepositoryIndexResponse()
        for each in self._models:
            is_ready = each.is_ready
            state, reason = ("READY", "") if is_ready else ("UNAVAILABLE", "no request would run at once")
            for name in each.adapters.names(current_caller()) if is_ready or not request.ready else ():
                response.models.add(name=name, version=MODEL_VERSION, state=state, reason=reason)
        return response

    def check_generates(self, name: str, version: str) -> None:
        """Raises NotFound if no such model is served, and Unimplemented if it generates no text."""
        self._target(name, version, "model_")
        options = RequestOptions(None, model=name)
        self._models.of(name, options.kind).check_kind(options)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context | None) -> pb.ModelInferResponse:
        generator = self._target(request.model_name, request.model_version, "model_")
        if generator.model.kind is not ModelKind.TEXT:
            return await infer_vectors(generator, request, self.rule)
        return await self._whole(read_inference(request, self.rule, in_stream=False))

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        # Sent at once, since proxies wait for the headers, and the client may send its first request late.
        await context.send_initial_metadata(())
        answer = self.answer if _wants_status(context) else self._answer_with_errors
        async with aclosing(answer_all(requests, answer)) as responses:
            async for response in responses:
                yield response

    async def answer(self, request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """All responses to one request of a stream. Raises QuireError."""
        generator = self._target(request.model_name, request.model_version, "model_")
        if generator.model.kind is not ModelKind.TEXT:
            yield in_stream(await infer_vectors(generator, request, self.rule), is_final=True)
            return
        inference = read_inference(request, self.rule, in_stream=True)
        if not inference.streams:
            yield in_stream(await self._whole(inference), is_final=True)
            return
        async with aclosing(self._pieces(inference)) as pieces:
            async for piece in pieces:
                yield piece

    async def _answer_with_errors(
        self, request: pb.ModelInferRequest
    ) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """All responses to one request of a stream. The last one may be an error."""
        try:
            async with aclosing(self.answer(request)) as responses:
                async for response in responses:
                    yield response
        except QuireError as error:
            yield error_response(self._models.default.model.name, request.id, error.message)
        except Exception:
            _logger.exception("a request of a stream failed unexpectedly")
            message = "an unexpected error; the server's log has details"
            yield error_response(self._models.default.model.name, request.id, message)

    async def _whole(self, inference: Inference) -> pb.ModelInferResponse:
        """Runs all prompts at once; if one fails, the others are aborted."""
        generator = self._generator_of(inference)
        responder = _responder(generator, inference)
        with generator.call_memory(AS_TENSORS) as memory:
            async with running(generator, inference.options, partial(_refusal, inference), memory) as live:
                return await answer(live, responder.whole)

    async def _pieces(self, inference: Inference) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """The text in pieces, then a last response without text, with the finish reason."""
        generator = self._generator_of(inference)
        responder = _responder(generator, inference)
        finished: Finished | None = None
        with generator.call_memory(STREAMED) as memory:
            async with running(generator, inference.options, partial(_refusal, inference), memory) as (live,):
                async for event in live.events():
                    match event:
                        case Chunk():
                            yield responder.piece(event)
                        case Finished():
                            finished = event
                        case Completed(usage=usage):
                            assert finished is not None, "a request completes when its sequences have finished"
                            yield responder.last(finished, usage)

    def _generator_of(self, inference: Inference) -> Generator:
        options = inference.options[0]
        return self._models.of(options.model, options.kind)

    def _target(self, name: str, version: str, prefix: str = "") -> Generator:
        """The generator of the model. Raises NotFound for another model or another version; `prefix` begins the names
        of their fields."""
        if (violation := self._models.violation(name)) is not None:
            raise NotFound(f"{prefix}name {violation.description}", reason="MODEL_NOT_FOUND")
        _check_version(f"{prefix}version", version)
        return self._models.named(name)


def _responder(generator: Generator, inference: Inference) -> Responder:
    model = generator.model
    return Responder(inference.options[0].model or model.name, inference, model.tokenizer.token_texts)


def _refusal(inference: Inference, position: int, error: QuireError) -> QuireError:
    """The error of the prompt at `position`, with the protocol's paths of fields."""
    return renamed(error, partial(inference.path, position))


def _wants_status(context: Context) -> bool:
    """Whether the client wants errors as the status of a stream; clients of Triton can choose."""
    return ("triton_grpc_error", "true") in (context.invocation_metadata() or ())


def _is_version(version: str) -> bool:
    return version in ("", MODEL_VERSION)


def _check_version(field: str, version: str) -> None:
    if not _is_version(version):
        raise NotFound(
            f'{field} is "{shortened(version)}"; the model has version {MODEL_VERSION}', reason="MODEL_NOT_FOUND"
        )


async def answer_all(
    requests: AsyncIterator[Request], answer: Callable[[Request], AsyncGenerator[Response, None]]
) -> AsyncGenerator[Response, None]:
    """The responses to all requests, in order for each request.

    A slow reader delays all answers, since each waits until its response is read. Closing this generator ends them all.

    Raises:
        Exception: an error of the requests or of an answer. All running answers are cancelled.
    """
    # Responses, one at a time, and None after the last one.
    responses: asyncio.Queue[Response | None] = asyncio.Queue(maxsize=1)
    places = asyncio.Semaphore(MAX_RUNNING)

    async def answer_one(request: Request) -> None:
        try:
            async with aclosing(answer(request)) as own:
                async for response in own:
                    await responses.put(response)
        finally:
            places.release()

    async def read_to_the_end() -> None:
        # If this is cancelled, the queue has no reader, so adding the None must not wait.
        try:
            async with asyncio.TaskGroup() as running:
                await places.acquire()
                async for request in requests:
                    release = keep_memory()
                    # As a callback, since a task that is cancelled before it begins runs none of its code.
                    running.create_task(answer_one(request)).add_done_callback(lambda _, release=release: release())
                    await places.acquire()
        except Exception:
            await responses.put(None)
            raise
        await responses.put(None)

    reading = asyncio.create_task(read_to_the_end())
    try:
        while (response := await responses.get()) is not None:
            yield response
        await reading
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        reading.cancel()
        await asyncio.wait([reading])


class UnservedMethods(grpc.GenericRpcHandler):
    """Rejects calls of the service's other methods. It must be added after the other handlers."""

    def __init__(self, service: ServiceDescriptor) -> None:
        self._prefix = f"/{service.full_name}/"
        self._served = ", ".join(method.name for method in service.methods)

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        if not method.startswith(self._prefix):
            return None
        name = method.removeprefix(self._prefix)
        way_out = _WAYS_OUT.get(name, f"the methods are {self._served}")

        async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> NoReturn:
            raise Unimplemented(f"{shortened(name)} is not served here; {way_out}")

        return grpc.unary_unary_rpc_method_handler(refuse)


def _model_config(name: str, signature: Signature) -> pb.ModelConfig:
    """The model's configuration in Triton's form."""
    return pb.ModelConfig(
        name=name,
        platform=_PLATFORM,
        backend=_PLATFORM,
        version_policy=pb.ModelVersionPolicy(specific=pb.ModelVersionPolicy.Specific(versions=[int(MODEL_VERSION)])),
        # Shapes have no batch dimension: the prompts of one tensor are a batch.
        max_batch_size=0,
        input=[
            pb.ModelInput(
                name=tensor,
                data_type=_DATA_TYPES[datatype],
                dims=signature.shape(tensor),
                optional=tensor not in signature.required,
            )
            for tensor, datatype in signature.inputs.items()
        ],
        output=[
            pb.ModelOutput(name=tensor, data_type=_DATA_TYPES[datatype], dims=signature.shape(tensor))
            for tensor, datatype in signature.outputs.items()
        ],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )


def _model_statistics(name: str, statistics: RequestStatistics) -> pb.ModelStatistics:
    last = statistics.last_completed_at_s
    return pb.ModelStatistics(
        name=name,
        version=MODEL_VERSION,
        last_inference=0 if last is None else round(last * 1000),
        inference_count=statistics.completed.count,
        inference_stats=pb.InferStatistics(
            success=_duration(statistics.completed),
            fail=_duration(statistics.failed),
            queue=_duration(statistics.queued),
            compute_infer=_duration(statistics.computed),
        ),
    )


def _duration(seconds: Distribution) -> pb.StatisticDuration:
    return pb.StatisticDuration(count=seconds.count, ns=round(seconds.sum * 1e9))


def _tensors(signature: Signature, datatypes: Mapping[str, str]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=signature.shape(name))
        for name, datatype in datatypes.items()
    ]
