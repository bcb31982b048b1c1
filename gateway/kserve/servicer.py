"""inference.GRPCInferenceService over the generator."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing

import grpc.aio

from gateway.auth.caller import current_caller
from gateway.events import Chunk, Completed, Finished
from gateway.generator import Generator
from gateway.kserve.inference_convert import INPUTS, OUTPUTS, Inference, read_inference
from gateway.kserve.response_convert import MODEL_VERSION, error_response, in_stream, piece_response, whole_response
from gateway.kserve.stream import answer_all
from gateway.validation import find_model, wrong_model
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import NotFound, QuireError
from quire.version import VERSION

Context = grpc.aio.ServicerContext
_logger = logging.getLogger(__name__)


class KServeServicer:
    """See protos/inference/open_inference.proto for what each method promises."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._model_name = generator.model.name

    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._generator.is_ready)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        is_served = wrong_model(request.name, self._visible_name()) is None and _is_version(request.version)
        return pb.ModelReadyResponse(ready=is_served and self._generator.is_ready)

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="quire", version=VERSION)

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        find_model(request.name, self._visible_name())
        _check_version(request.version)
        return pb.ModelMetadataResponse(
            name=self._model_name,
            versions=[MODEL_VERSION],
            platform="quire",
            inputs=_tensors(INPUTS),
            outputs=_tensors(OUTPUTS),
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        self._check_model(request)
        return await self._whole(read_inference(request, in_stream=False))

    async def ModelStreamInfer(
        self, requests: AsyncIterator[pb.ModelInferRequest], context: Context
    ) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async with aclosing(answer_all(requests, self._answer)) as responses:
            async for response in responses:
                yield response

    async def _answer(self, request: pb.ModelInferRequest) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """All responses to one request of a stream, the last of which may be an error."""
        try:
            self._check_model(request)
            inference = read_inference(request, in_stream=True)
            if not inference.streams:
                yield in_stream(await self._whole(inference), is_final=True)
                return
            async with aclosing(self._pieces(inference)) as pieces:
                async for piece in pieces:
                    yield piece
        except QuireError as error:
            yield error_response(self._model_name, request.id, error.message)
        except Exception:
            _logger.exception("a request of a stream failed unexpectedly")
            message = "an unexpected error; the server's log tells more"
            yield error_response(self._model_name, request.id, message)

    async def _whole(self, inference: Inference) -> pb.ModelInferResponse:
        """Runs all prompts at once; where one fails, the others are aborted."""
        async with AsyncExitStack() as running:
            live = [await running.enter_async_context(self._generator.run(options)) for options in inference.options]
            results = [await each.result() for each in live]
        return whole_response(self._model_name, inference, results)

    async def _pieces(self, inference: Inference) -> AsyncGenerator[pb.ModelStreamInferResponse, None]:
        """The text as it comes, then a last response without text that says how it ended."""
        finished: Finished | None = None
        async with self._generator.run(inference.options[0]) as live:
            async for event in live.events():
                match event:
                    case Chunk(text=text, token_ids=token_ids):
                        piece = piece_response(self._model_name, inference, text, len(token_ids), None, None)
                        yield in_stream(piece, is_final=False)
                    case Finished():
                        finished = event
                    case Completed(usage=usage):
                        piece = piece_response(self._model_name, inference, "", 0, usage, finished)
                        yield in_stream(piece, is_final=True)

    def _check_model(self, request: pb.ModelInferRequest) -> None:
        """Raises NotFound: clients of this protocol look the model up by every request."""
        find_model(request.model_name, self._visible_name())
        _check_version(request.model_version)

    def _visible_name(self) -> str | None:
        return current_caller().visible(self._model_name)


def _is_version(version: str) -> bool:
    return version in ("", MODEL_VERSION)


def _check_version(version: str) -> None:
    if not _is_version(version):
        raise NotFound(
            f'model version is "{version[:80]}"; the model has version {MODEL_VERSION}', reason="MODEL_NOT_FOUND"
        )


def _tensors(datatypes: dict[str, str]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=name, datatype=datatype, shape=[-1])
        for name, datatype in datatypes.items()
    ]
