"""Completions and chat completions over the generator."""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial

from starlette.responses import Response

from gateway.api.answers import StreamedResponse, WholeResponse, as_json, json_pieces
from gateway.api.errors import HttpError, error_answer
from gateway.openai.calls import Call
from gateway.openai.shapes import Shaper
from gateway.openai.token_text import TokenTexts
from gateway.replicas.events import Chunk, Completed, Finished, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import IN_PIECES, STREAMED, CallMemory
from gateway.request.generator import Generator
from gateway.request.running import answer_event, events, results_of, running
from gateway.request.types import RequestOptions
from quire.rpc.errors import QuireError

_HEADER_VALUE = re.compile(r"[!-~]{1,256}")


class OpenAiService:
    """Answers calls; what they have in common with gRPC is the generator's."""

    def __init__(self, generator: Generator, keep_alive_s: float) -> None:
        """`keep_alive_s` is how long streams are silent at most; 0 sets no limit."""
        self._generator = generator
        self._keep_alive_s = keep_alive_s
        self._token_texts: TokenTexts | None = None

    def respond(self, call: Call) -> Response:
        # An id that is refused may hold what no header can, or be too long for one.
        headers = {"x-request-id": call.head.id} if _HEADER_VALUE.fullmatch(call.head.id) else {}
        names = partial(call.param_name, 0)
        if call.body.stream:
            live: list[LiveRequest] = []
            # A request without a replica waits for a scheduler, and fails where none comes.
            return StreamedResponse(
                partial(self._stream, call, live),
                lambda: bool(live) and all(each.replica is not None for each in live),
                self._keep_alive_s,
                names,
                headers,
            )
        return WholeResponse(partial(self._whole, call), names, headers)

    async def _whole(self, call: Call) -> AsyncGenerator[bytes, None]:
        """The body in pieces. The memory of the answer is counted until all of it was taken."""
        requests = await call.requests(self._generator)
        texts = await self._texts_for(call)
        with self._generator.call_memory(IN_PIECES) as memory:
            async with self._running(call, requests, memory) as live:
                shaper = await call.shaper(self._generator, live, texts)
                results = await results_of(live)
            memory.raise_if_ended()
            writer = asyncio.current_task()
            assert writer is not None
            memory.when_ended(lambda error: writer.cancel(error.message))
            try:
                for piece in json_pieces(shaper.whole(results)):
                    yield piece
                    # Between the pieces other calls have their turns.
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                # Where the body has not begun, the client can still be told why it is ended.
                memory.raise_if_ended()
                raise

    async def _stream(self, call: Call, running_now: list[LiveRequest]) -> AsyncGenerator[bytes, None]:
        """The events as JSON. The requests are added to `running_now` when they run."""
        requests = await call.requests(self._generator)
        texts = await self._texts_for(call)
        usages: list[Usage] = []
        async with (
            self._streaming(call, requests) as live,
            aclosing(events(live)) as all_events,
        ):
            running_now += live
            shaper = await call.shaper(self._generator, live, texts)
            async for position, event in all_events:
                if isinstance(event, Completed):
                    usages.append(event.usage)
                else:
                    yield await answer_event(live[position], event, partial(_chunk, shaper, position, event))
            options = call.body.stream_options
            if options is not None and options.include_usage:
                yield as_json(shaper.usage_chunk(usages))

    @asynccontextmanager
    async def _streaming(self, call: Call, requests: Sequence[RequestOptions]) -> AsyncIterator[list[LiveRequest]]:
        with self._generator.call_memory(STREAMED) as memory:
            async with self._running(call, requests, memory) as live:
                yield live

    def _running(
        self, call: Call, requests: Sequence[RequestOptions], memory: CallMemory
    ) -> AbstractAsyncContextManager[list[LiveRequest]]:
        refusal = partial(_refusal, call)
        return running(self._generator, requests, refusal, memory, shows_prompt_by_sequence=call.shows_prompt_by_choice)

    async def _texts_for(self, call: Call) -> TokenTexts | None:
        """The tokens' texts, where the call needs them; made when they are needed for the first time."""
        if not call.wants_token_texts:
            return None
        if self._token_texts is None:
            self._token_texts = await TokenTexts.load(self._generator.model.tokenizer)
        return self._token_texts


def _chunk(shaper: Shaper, position: int, event: Chunk | Finished) -> bytes:
    return as_json(shaper.chunk(position, event))


def _refusal(call: Call, position: int, error: QuireError) -> HttpError:
    """The answer to an error of the request at `position`, in which fields are those of the body."""
    return HttpError(error_answer(error, partial(call.param_name, position)))
