"""Completions and chat completions over the generator."""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.responses import Response

from gateway.openai.calls import Call
from gateway.openai.errors import HttpError, error_answer
from gateway.openai.responses import StreamedResponse, WholeResponse, as_json
from gateway.openai.token_text import TokenTexts
from gateway.requests.events import Completed, Usage
from gateway.requests.generator import Generator
from gateway.requests.running import answer, events, running
from quire.rpc.errors import QuireError

_HEADER_VALUE = re.compile(r"[!-~]+")


class OpenAiService:
    """Answers calls; what they have in common with gRPC is the generator's."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._token_texts: TokenTexts | None = None

    def respond(self, call: Call) -> Response:
        # An id that is refused may hold what no header can.
        headers = {"x-request-id": call.head.id} if _HEADER_VALUE.fullmatch(call.head.id) else {}
        names = partial(call.param_name, 0)
        if call.body.stream:
            return StreamedResponse(partial(self._stream, call), names, headers)
        return WholeResponse(partial(self._whole, call), names, headers)

    async def _whole(self, call: Call) -> bytes:
        requests = await call.requests(self._generator)
        texts = await self._texts_for(call)
        async with running(self._generator, requests, partial(_refusal, call)) as live:
            shaper = call.shaper(self._generator, live, texts)
            return await answer(live, lambda results: as_json(shaper.whole(results)))

    async def _stream(self, call: Call) -> AsyncGenerator[dict[str, Any], None]:
        requests = await call.requests(self._generator)
        texts = await self._texts_for(call)
        usages: list[Usage] = []
        async with (
            running(self._generator, requests, partial(_refusal, call)) as live,
            aclosing(events(live)) as all_events,
        ):
            shaper = call.shaper(self._generator, live, texts)
            async for position, event in all_events:
                if isinstance(event, Completed):
                    usages.append(event.usage)
                else:
                    yield shaper.chunk(position, event)
            options = call.body.stream_options
            if options is not None and options.include_usage:
                yield shaper.usage_chunk(usages)

    async def _texts_for(self, call: Call) -> TokenTexts | None:
        """The tokens' texts, where the call needs them; made when they are needed for the first time."""
        if not call.wants_token_texts:
            return None
        if self._token_texts is None:
            self._token_texts = await TokenTexts.load(self._generator.model.tokenizer)
        return self._token_texts


def _refusal(call: Call, position: int, error: QuireError) -> HttpError:
    """The answer to an error of the request at `position`, in which fields are those of the body."""
    return HttpError(error_answer(error, partial(call.param_name, position)))
