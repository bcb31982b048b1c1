"""Quire over gRPC, by bare stubs: additional work of the client of `quire.client` would be measured with it."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import grpc
import grpc.aio
import numpy as np

from quire.client import AsyncClient, BeamSearch, ClientTls, GenerationOptions
from quire.client.client_messages import to_chat_request, to_generate_request
from quire.client.connection import make_stubs, open_channel
from quire.gateway.v1 import generation_pb2
from quire.load import LoadRequest
from quire.rpc.errors import Unavailable, from_rpc_error
from quire.runtime.settings import ConfigurationError
from quire_cli.bench.driver import Answer, CannotMeasureError, Chunks, RequestFailedError, ServerFacts


class GrpcServer:
    """The gateway at an address; `model` is None for the only one that it serves. `sampling` applies to all requests
    except beam searches."""

    def __init__(
        self,
        address: str,
        *,
        model: str | None,
        api_key: str | None,
        tls: ClientTls | None,
        sampling: Mapping[str, Any],
        ignore_eos: bool,
    ) -> None:
        self._address, self._api_key, self._tls = address, api_key, tls
        self._model = model
        self._sampling = sampling
        self._ignore_eos = ignore_eos
        self._channel = open_channel(grpc.aio, address, tls)
        self._generation = make_stubs(self._channel, api_key).generation

    async def connect(self) -> ServerFacts:
        try:
            async with AsyncClient(self._address, api_key=self._api_key, tls=self._tls) as client:
                models = {model.name: model for model in await client.list_models(timeout_s=10)}
                info = await client.server_info(timeout_s=10)
        except Unavailable as error:
            why = " ".join(error.message.split())
            raise CannotMeasureError(f"no gateway answers at {self._address} ({why}); is --address right?") from None
        names = ", ".join(models) or "none"
        if self._model is None and len(models) != 1:
            raise ConfigurationError(f"--model is missing; {self._address} serves {names}")
        model = models.get(self._model or next(iter(models)))
        if model is None:
            raise ConfigurationError(f'--model: "{self._model}" is not served at {self._address}; it serves {names}')
        self._model = model.name
        details = {
            "version": info.version,
            "dtype": model.dtype,
            "architecture": model.architecture,
            "replicas": [asdict(replica) for replica in info.replicas],
        }
        return ServerFacts(model.name, model.vocab_size, model.max_model_len, details)

    async def send(self, request: LoadRequest, chunks: Chunks, history: Any) -> Answer:
        """`history` is the prompt and the answer of the turn before, in token ids."""
        if history is not None:
            request = request.carrying(*history)
        answer: list[Sequence[int]] = []
        call = self._call(request)
        try:
            async for response in call:
                if response.HasField("chunk"):
                    chunk = response.chunk
                    if chunk.token_ids:
                        chunks.add(chunk.sequence_index, len(chunk.token_ids))
                        if request.group is not None:
                            answer.append(chunk.token_ids)
                elif response.HasField("completed"):
                    usage = response.completed.usage
                    # Only a next turn of the conversation needs the answer.
                    carried = (request.prompt, np.concatenate(answer)) if answer else None
                    drafts = (usage.drafted_tokens, usage.accepted_draft_tokens)
                    return Answer(usage.prompt_tokens, usage.cached_tokens, usage.preemptions, carried, *drafts)
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            known = f"{failure.code.name} ({failure.reason})"
            reason = failure.code.name if failure.reason == failure.code.name else known
            raise RequestFailedError(reason, " ".join(failure.message.split())) from None
        except asyncio.CancelledError:
            call.cancel()
            raise
        raise RequestFailedError("INCOMPLETE_STREAM", "the stream ended without its last message")

    def _call(self, request: LoadRequest) -> Any:
        width = request.beam_width
        options = GenerationOptions(
            **(self._sampling if width is None else {}),
            n=request.n,
            beam_search=None if width is None else BeamSearch(width),
            max_tokens=request.output_len,
            ignore_eos=self._ignore_eos if request.output_len is not None else None,
        )
        prompt = request.prompt
        if isinstance(prompt, tuple):
            messages = [{"role": message.role, "content": message.content} for message in prompt]
            message = to_chat_request(generation_pb2.ChatStreamRequest(), messages, options, {"model": self._model})
            return self._generation.ChatStream(message)
        text_or_ids = prompt if isinstance(prompt, str) else prompt.tolist()
        message = generation_pb2.GenerateStreamRequest()
        return self._generation.GenerateStream(to_generate_request(message, text_or_ids, options, model=self._model))

    async def close(self) -> None:
        await self._channel.close()
