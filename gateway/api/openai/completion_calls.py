"""The calls of completions and chat completions: their requests, and the writers of their answers."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Generic, Self, TypeVar

from gateway.api.answers import client_request_id
from gateway.api.body import validated
from gateway.api.durable_streams import FrontEnd
from gateway.api.fields import Names
from gateway.api.generation_fields import CompletionBody, GenerationBody, completion_options, is_echo_alone, names_of
from gateway.api.openai.read_openai import chat_names, chat_options, completion_prompts
from gateway.api.openai.schemas import ChatBody
from gateway.api.openai.write_openai import ChatShaper, CompletionShaper, head_of
from gateway.api.respond import Call
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Generator
from gateway.request.limits import MAX_REQUEST_ID_LENGTH
from gateway.text.fill_in import fill_in_prompt
from gateway.text.tokenizer import Tokenizer
from gateway.turns import Turns
from gateway.types import Prompt, RequestOptions, TextPrompt
from quire.rpc.errors import invalid_field
from quire.runtime import clock, entropy

BodyType = TypeVar("BodyType", bound=GenerationBody)
# Ids that stay valid with the prefix, the suffix and the number of a prompt.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,96}")


class _Call(Call, Generic[BodyType]):
    """The common part of both calls."""

    body_type: type[BodyType]
    id_prefix: str

    def __init__(self, body: BodyType, model: str) -> None:
        self.id = f"{self.id_prefix}-{body.request_id or _new_id()}"
        self._body = body
        self.streams = bool(body.stream)
        self._head = head_of(self.id, int(clock.unix_s()), model)
        # The id by which the request can be cancelled.
        self._request_id = self.id if body.request_id is None else body.request_id
        self._is_durable = bool(body.durable)

    @classmethod
    def read_back(cls, live: LiveRequest) -> Self:
        """The call that began a durable stream. Raises NotFound if it was of another API."""
        kept = FrontEnd.of(live.request.front_end, cls.body_type.api, live.request.request_id)
        call = cls(validated(cls.body_type, kept.body), kept.model)
        call.id, call._head = kept.id, head_of(kept.id, kept.created, kept.model)
        return call

    def _front_end(self, body: BodyType) -> bytes:
        """The front end's data of a durable stream, else empty. Raises InvalidArgument if it is too large."""
        if not self._is_durable:
            return b""
        fields = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return FrontEnd(body.api, self.id, self._head["created"], self._head["model"], fields, {}).to_bytes()


def _new_id() -> str:
    """A unique id that begins with the client's X-Request-Id, by which logs are searched. Proxies and agents send the
    same X-Request-Id with several calls, so it is not unique by itself."""
    given = client_request_id.get()
    if given is None or not _CLIENT_ID.fullmatch(given):
        return entropy.random_hex(16)
    return f"{given}-{entropy.random_hex(4)}"


class ChatCall(_Call[ChatBody]):
    """A chat completion: one request."""

    body_type = ChatBody
    id_prefix = "chatcmpl"

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        options = chat_options(self._body, self._request_id)
        # An answer shows at most the last message of the conversation.
        messages = self._body.messages[-1:] if self._body.echo else []
        front_end = self._front_end(self._body.model_copy(update={"messages": messages}))
        return [dataclasses.replace(options, durable=self._is_durable, front_end=front_end)]

    def names(self, position: int) -> Names:
        return chat_names(self._body)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> ChatShaper:
        return ChatShaper(self._head, self._body, live[0], generator.model.tokenizer.token_texts)


class CompletionCall(_Call[CompletionBody]):
    """A completion: one request per prompt."""

    shows_prompt_by_choice = True
    body_type = CompletionBody
    id_prefix = "cmpl"

    def __init__(self, body: CompletionBody, model: str) -> None:
        """Raises InvalidArgument for a missing prompt."""
        if body.prompt is None:
            raise invalid_field("prompt", "is missing")
        super().__init__(body, model)
        self._prompts = completion_prompts(body)

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        num_prompts = len(self._prompts)
        if num_prompts > 1:
            _check_shared_id(self._body.request_id, num_prompts)
            if self._is_durable:
                raise invalid_field("durable", f"is true, but there are {num_prompts:,} prompts; only one is allowed")
        first_id = self._request_id
        ids = [first_id] if num_prompts == 1 else [f"{first_id}-{position}" for position in range(num_prompts)]
        # The requests share one object with their parameters.
        options = completion_options(self._body, None, first_id)
        options = dataclasses.replace(options, durable=self._is_durable, front_end=self._front_end(self._body))
        turns = Turns()
        requests: list[RequestOptions] = []
        for prompt, request_id in zip(self._prompts, ids, strict=True):
            filled = _with_suffix(prompt, self._body.suffix, generator)
            requests.append(dataclasses.replace(options, prompt=filled, request_id=request_id))
            await turns.pause()
        return requests

    def names(self, position: int) -> Names:
        return names_of(self._body, "prompt" if len(self._prompts) == 1 else f"prompt[{position}]")

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> CompletionShaper:
        tokenizer = generator.model.tokenizer
        echoes: list[str] = []
        for prompt, each in zip(self._prompts, live, strict=True):
            echoes.append(await _echo_text(self._body, prompt, each, tokenizer) if self._body.echo else "")
        return CompletionShaper(self._head, self._body, self._prompts, echoes, live, tokenizer)


def _with_suffix(prompt: Prompt, suffix: str | None, generator: Generator) -> Prompt:
    """The prompt for the text before a suffix. Raises InvalidArgument if the model has no fill-in-the-middle tokens."""
    if not suffix:
        return prompt
    if not isinstance(prompt, TextPrompt):
        raise invalid_field("suffix", "is set, and the prompt is token ids; send it as text")
    text = fill_in_prompt(generator.model.tokenizer, prompt.text, suffix)
    if text is None:
        raise invalid_field("suffix", "is set, and the model has no tokens to fill in the middle of a text")
    return dataclasses.replace(prompt, text=text)


async def _echo_text(body: CompletionBody, prompt: Prompt | None, live: LiveRequest, tokenizer: Tokenizer) -> str:
    if isinstance(prompt, TextPrompt) and body.truncate_prompt_tokens is None:
        return prompt.text
    decode = tokenizer.decode_any if is_echo_alone(body) else tokenizer.prompt_text
    return await decode(
        live.request.prompt_token_ids.tolist(),
        include_special_tokens=live.request.output.include_special_tokens,
    )


def _check_shared_id(request_id: str | None, num_prompts: int) -> None:
    """Raises InvalidArgument if the id is too long when the number of each prompt is appended."""
    limit = MAX_REQUEST_ID_LENGTH - len(f"-{num_prompts - 1}")
    if request_id is not None and len(request_id) > limit:
        raise invalid_field(
            "request_id",
            f"has {len(request_id):,} characters; with {num_prompts:,} prompts the max is {limit}, since -N is "
            "appended for each",
        )
