"""A call of the API: the requests that it makes of the generator, and its answer, whole or as a stream."""

import asyncio
import dataclasses
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial

from starlette.responses import Response

from gateway.api.answers import HttpError, StreamedResponse, WholeResponse, as_json, error_answer, json_pieces
from gateway.api.openai.read import chat_options, completion_options, completion_prompts, param_name
from gateway.api.openai.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.api.openai.write import ChatShaper, CompletionShaper, Head, TokenTexts
from gateway.auth.caller import current_caller
from gateway.replicas.events import Chunk, Completed, Finished, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import IN_PIECES, STREAMED, CallMemory
from gateway.request.generator import Generator, answer_event, events, results_of, running
from gateway.request.limits import MAX_REQUEST_ID_LENGTH
from gateway.request.types import Prompt, RequestOptions, TextPrompt, TokenPrompt
from gateway.request.validation import Violations, check_model, check_prompt
from gateway.text.tokenizer import Tokenizer
from gateway.turns import Turns
from quire.rpc.errors import QuireError, invalid_field

_HEADER_VALUE = re.compile(r"[!-~]{1,256}")


class ChatCall:
    """A chat completion: one request."""

    # Whether each choice has the log probabilities of its prompt.
    shows_prompt_by_choice = False

    def __init__(self, body: ChatBody, model: str) -> None:
        self.body = body
        self.head = _head("chatcmpl", body, model)

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        """Its requests, not validated yet. Raises QuireError or HttpError where the call is wrong."""
        return [chat_options(self.body, _request_id(self.body, self.head))]

    def param_name(self, position: int, field: str) -> str:
        """The name in the body of a field of the request at `position`."""
        return param_name(self.body, field)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest], texts: TokenTexts) -> ChatShaper:
        return ChatShaper(self.head, self.body, live[0], texts)


class CompletionCall:
    """A completion: one request a prompt."""

    shows_prompt_by_choice = True

    def __init__(self, body: CompletionBody, model: str) -> None:
        """Raises InvalidArgument: there is no prompt."""
        if body.prompt is None:
            raise invalid_field("prompt", "is missing")
        self.body = body
        self.head = _head("cmpl", body, model)
        self._prompts = completion_prompts(body)

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        num_prompts = len(self._prompts)
        if num_prompts > 1:
            _check_shared_id(self.body.request_id, num_prompts)
        first_id = _request_id(self.body, self.head)
        ids = [first_id] if num_prompts == 1 else [f"{first_id}-{position}" for position in range(num_prompts)]
        # All have the same parameters, as one object.
        options = completion_options(self.body, None, first_id)
        turns = Turns()
        requests: list[RequestOptions] = []
        for position, request_id in enumerate(ids):
            prompt = await self._encoded(generator, position)
            requests.append(dataclasses.replace(options, prompt=prompt, request_id=request_id))
            await turns.pause()
        return requests

    def param_name(self, position: int, field: str) -> str:
        name = param_name(self.body, field)
        if len(self._prompts) == 1 or not name.startswith("prompt") or name.startswith("prompt_"):
            return name
        return f"prompt[{position}]{name.removeprefix('prompt')}"

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest], texts: TokenTexts) -> CompletionShaper:
        tokenizer = generator.model.tokenizer
        echoes: list[str] = []
        for prompt, each in zip(self._prompts, live, strict=True):
            echoes.append(await _echo_text(prompt, each, tokenizer) if self.body.echo else "")
        return CompletionShaper(self.head, self.body, self._prompts, echoes, live, tokenizer, texts)

    async def _encoded(self, generator: Generator, position: int) -> Prompt | None:
        """The prompt at `position`; as tokens, where the text shall get no special tokens.

        Raises:
            HttpError: the text is refused before it is tokenized, as the generator would refuse it.
        """
        prompt = self._prompts[position]
        if self.body.add_special_tokens is not False or not isinstance(prompt, TextPrompt):
            return prompt
        try:
            limits = await generator.limits()
            check_model(self.body.model, current_caller().visible(generator.model.name))
            violations = Violations()
            check_prompt(violations, prompt, limits)
            violations.raise_if_any()
        except QuireError as error:
            raise HttpError(error_answer(error, partial(self.param_name, position))) from error
        return TokenPrompt(await generator.model.tokenizer.encode(prompt.text, add_special_tokens=False))


async def _echo_text(prompt: Prompt | None, live: LiveRequest, tokenizer: Tokenizer) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    request = live.request
    return await tokenizer.decode_any(
        request.prompt_token_ids.tolist(), include_special_tokens=request.output.include_special_tokens
    )


def _head(prefix: str, body: GenerationBody, model: str) -> Head:
    return Head(f"{prefix}-{body.request_id or secrets.token_hex(16)}", int(time.time()), model)


def _request_id(body: GenerationBody, head: Head) -> str:
    """The id by which the request runs and can be cancelled."""
    return head.id if body.request_id is None else body.request_id


def _check_shared_id(request_id: str | None, num_prompts: int) -> None:
    """The number of each prompt is appended to the id."""
    limit = MAX_REQUEST_ID_LENGTH - len(f"-{num_prompts - 1}")
    if request_id is not None and len(request_id) > limit:
        raise invalid_field(
            "request_id",
            f"has {len(request_id):,} characters; with {num_prompts:,} prompts, each of which adds -N to it, "
            f"the max is {limit}",
        )


Call = ChatCall | CompletionCall


class OpenAiService:
    """Answers calls."""

    def __init__(self, generator: Generator, keep_alive_s: float) -> None:
        """`keep_alive_s` is the longest silence of a stream; 0 sets no limit."""
        self._generator = generator
        self._keep_alive_s = keep_alive_s
        self._token_texts = TokenTexts(generator.model.tokenizer)

    def respond(self, call: Call) -> Response:
        # An id that will be refused may have characters that no header can hold, or be too long for one.
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
        """The body in pieces. The memory of the answer is counted until the client has taken it."""
        requests = await call.requests(self._generator)
        with self._generator.call_memory(IN_PIECES) as memory:
            async with self._running(call, requests, memory) as live:
                shaper = await call.shaper(self._generator, live, self._token_texts)
                results = await results_of(live)
            memory.raise_if_ended()
            writer = asyncio.current_task()
            assert writer is not None
            memory.when_ended(lambda error: writer.cancel(error.message))
            try:
                for piece in json_pieces(shaper.whole(results)):
                    yield piece
                    # Other calls run between the pieces.
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                # Where the body has not begun, the client still gets the reason.
                memory.raise_if_ended()
                raise

    async def _stream(self, call: Call, running_now: list[LiveRequest]) -> AsyncGenerator[bytes, None]:
        """The events as JSON. The requests are added to `running_now` when they run."""
        requests = await call.requests(self._generator)
        usages: list[Usage] = []
        async with self._streaming(call, requests) as live, aclosing(events(live)) as all_events:
            running_now += live
            shaper = await call.shaper(self._generator, live, self._token_texts)
            async for position, event in all_events:
                if isinstance(event, Completed):
                    usages.append(event.usage)
                else:
                    make = partial(_chunk, shaper, position, event)
                    yield await answer_event(live[position], event, make)
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


def _chunk(shaper: ChatShaper | CompletionShaper, position: int, event: Chunk | Finished) -> bytes:
    return as_json(shaper.chunk(position, event))


def _refusal(call: Call, position: int, error: QuireError) -> HttpError:
    """The answer to an error of the request at `position`, with the body's names of fields."""
    return HttpError(error_answer(error, partial(call.param_name, position)))
