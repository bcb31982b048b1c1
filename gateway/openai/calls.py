"""One call of the API: the requests that it stands for, and the shape of its answer."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from gateway.api.errors import HttpError, error_answer
from gateway.auth.caller import current_caller
from gateway.openai.chat import ChatShaper
from gateway.openai.completions import CompletionShaper
from gateway.openai.options import chat_options, completion_options, completion_prompts, param_name
from gateway.openai.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.openai.shapes import Head, Shaper
from gateway.openai.token_text import TokenTexts
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Generator
from gateway.request.limits import MAX_PROMPTS, MAX_REQUEST_ID_LENGTH
from gateway.request.types import Prompt, RequestOptions, TextPrompt, TokenPrompt
from gateway.request.validation import check_model, check_prompt
from gateway.request.violations import Violations
from gateway.text.tokenizer import Tokenizer
from gateway.turns import Turns
from quire.rpc.errors import QuireError


class Call(Protocol):
    @property
    def head(self) -> Head: ...

    @property
    def body(self) -> GenerationBody: ...

    @property
    def wants_token_texts(self) -> bool:
        """Whether the answer shows single tokens."""
        ...

    @property
    def shows_prompt_by_choice(self) -> bool:
        """Whether each choice has the log probabilities of its prompt."""
        ...

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        """Raises QuireError or HttpError where the call is at fault; each request is still to be validated."""
        ...

    def param_name(self, position: int, field: str) -> str:
        """What a field of the request at `position` is called in the body."""
        ...

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest], texts: TokenTexts | None) -> Shaper: ...


class ChatCall:
    """A chat completion: one request."""

    shows_prompt_by_choice = False

    def __init__(self, body: ChatBody, model: str) -> None:
        self.body = body
        self.head = _head("chatcmpl", body, model)

    @property
    def wants_token_texts(self) -> bool:
        return bool(self.body.logprobs) or self.body.prompt_logprobs is not None

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        return [chat_options(self.body, _request_id(self.body, self.head))]

    def param_name(self, position: int, field: str) -> str:
        return param_name(self.body, field)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest], texts: TokenTexts | None) -> Shaper:
        return ChatShaper(self.head, self.body, live[0], texts)


class CompletionCall:
    """A completion: one request a prompt."""

    shows_prompt_by_choice = True

    def __init__(self, body: CompletionBody, model: str) -> None:
        """Raises InvalidArgument: there is no prompt, or there are too many."""
        _check_prompts(body)
        self.body = body
        self.head = _head("cmpl", body, model)
        self._prompts = completion_prompts(body)

    @property
    def wants_token_texts(self) -> bool:
        return self.body.logprobs is not None or self.body.prompt_logprobs is not None

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

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest], texts: TokenTexts | None) -> Shaper:
        tokenizer = generator.model.tokenizer
        echoes: list[str] = []
        for prompt, each in zip(self._prompts, live, strict=True):
            echoes.append(await _echo_text(prompt, each, tokenizer) if self.body.echo else "")
        return CompletionShaper(self.head, self.body, self._prompts, echoes, live, tokenizer, texts)

    async def _encoded(self, generator: Generator, position: int) -> Prompt | None:
        """A prompt as the generator shall see it: as tokens, where its text is to get no special ones.

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
    """The id by which the request runs, and by which it can be cancelled."""
    return head.id if body.request_id is None else body.request_id


def _check_prompts(body: CompletionBody) -> None:
    violations = Violations()
    if body.prompt is None:
        violations.add("prompt", "is missing")
    # A list of numbers is one prompt.
    elif isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int):
        violations.check_count("prompt", body.prompt, MAX_PROMPTS)
    violations.raise_if_any()


def _check_shared_id(request_id: str | None, num_prompts: int) -> None:
    """The id leaves room for the number of each prompt behind it."""
    violations = Violations()
    limit = MAX_REQUEST_ID_LENGTH - len(f"-{num_prompts - 1}")
    if request_id is not None and len(request_id) > limit:
        violations.add(
            "request_id",
            f"has {len(request_id):,} characters; with {num_prompts:,} prompts, each of which adds -N to it, "
            f"the most is {limit}",
        )
    violations.raise_if_any()
