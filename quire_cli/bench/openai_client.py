"""Any server with OpenAI's API of completions or chats, over HTTP. Needs httpx, of the extra quire-llm[bench]."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from quire.load import LoadRequest
from quire.runtime.settings import ConfigurationError
from quire_cli.bench.driver import (
    MALFORMED_ANSWER,
    Answer,
    CannotMeasureError,
    Chunks,
    RequestFailedError,
    ServerFacts,
    check_count,
)
from quire_torture.client import event_data

# Short and common, so that most tokenizers have about one token for each.
_TEXT = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our man"
)
_WORDS = _TEXT.split()

_MODELS_S = 10.0
_FIRST_ANSWER_S = 60.0
"""A server that has just started may compile or load something first."""


@dataclass(frozen=True, slots=True)
class _History:
    """Messages of a conversation so far, each with the tokens that were planned for it."""

    messages: tuple[tuple[dict[str, str], int], ...]


class OpenAiServer:
    """A server's OpenAI API.

    Args:
        url: With or without the path `/v1`.
        model: None is the only one that it serves.
        endpoint: "completions", "chat", or None: chats for messages, completions for all else.
        ignore_eos: Outputs have the planned length, if the server supports `ignore_eos` and `min_tokens`, as
            vLLM, SGLang and Quire do; others end as they like.
        transport: Stands in for the network.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        api_key: str | None,
        endpoint: str | None,
        sampling: Mapping[str, float],
        ignore_eos: bool,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not _is_url(url):
            raise ConfigurationError(f'--address: "{url}" is not valid: expected http://HOST:PORT or https://HOST:PORT')
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigurationError("--api-key has characters that a header cannot have; expected printable ASCII")
        self._base = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._endpoint = endpoint
        self._sampling = sampling
        self._ignore_eos = ignore_eos
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        # A slot for each request at once: waiting for a connection would count as the server's time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=self._base, headers=headers, timeout=None, limits=limits, transport=transport
        )

    async def connect(self) -> ServerFacts:
        models = await self._models()
        names = ", ".join(models) or "none"
        if self._model is None and len(models) != 1:
            raise ConfigurationError(f"--model is missing; {self._base} serves {names}")
        model = models.get(self._model or next(iter(models)))
        if model is None:
            raise ConfigurationError(f'--model: "{self._model}" is not served at {self._base}; it serves {names}')
        self._model = str(model["id"])
        if self._ignore_eos:
            self._ignore_eos = await self._knows_ignore_eos()
        details = {"owned_by": model.get("owned_by"), "ignore_eos": self._ignore_eos}
        longest = model.get("max_model_len")
        return ServerFacts(self._model, None, longest if isinstance(longest, int) and longest > 1 else None, details)

    async def _models(self) -> dict[str, Mapping[str, Any]]:
        try:
            response = await self._http.get("/v1/models", timeout=_MODELS_S)
        except httpx.HTTPError as error:
            why = _why(error, _MODELS_S)
            raise CannotMeasureError(f"no server answers at {self._base} ({why}); is --address right?") from None
        if response.status_code in (401, 403):
            raise CannotMeasureError(f"{self._base} asks for an API key, or for another one; set QUIRE_API_KEY")
        if response.status_code == 429 or response.status_code >= 500:
            failure = _failure(response.status_code, response.content)
            raise CannotMeasureError(f"{self._base} is not ready: {failure.reason} to /v1/models: {failure.message}")
        try:
            return {str(model["id"]): dict(model) for model in response.json()["data"]}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            what = f"{response.status_code} to /v1/models, and no list of models"
            raise CannotMeasureError(f"{self._base} answers {what}; is it an OpenAI API?") from None

    async def _knows_ignore_eos(self) -> bool:
        """Whether the server accepts the fields by which outputs get their length."""
        request = LoadRequest(0, _WORDS[0], 1)
        path, body = self._body(request, None)
        body |= {"stream": False, "stream_options": None}
        try:
            response = await self._http.post(path, json=body, timeout=_FIRST_ANSWER_S)
        except httpx.HTTPError as error:
            why = _why(error, _FIRST_ANSWER_S)
            raise CannotMeasureError(f"{self._base} does not answer the first request, of one token: {why}") from None
        return response.status_code not in (400, 422)

    async def send(self, request: LoadRequest, chunks: Chunks, history: Any) -> Answer:
        path, body = self._body(request, history)
        text: list[str] = []
        try:
            if body["stream"]:
                usage = await self._stream(path, body, chunks, text)
            else:
                usage = await self._whole(path, body, chunks, text)
            num_prompt = usage.get("prompt_tokens")
            num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        except httpx.HTTPError as error:
            raise RequestFailedError(type(error).__name__, str(error) or "the connection broke") from None
        except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError) as error:
            why = f"the answer has not the form of OpenAI's API: {type(error).__name__} {error}"
            raise RequestFailedError(MALFORMED_ANSWER, why) from None
        for name, count in (("number of prompt tokens", num_prompt), ("number of cached tokens", num_cached)):
            if count is not None:
                check_count(name, count)
        carried = None
        if request.group is not None and "messages" in body:
            answer = {"role": "assistant", "content": "".join(text)}
            carried = _History((*self._planned(request, history), (answer, request.output_len or 0)))
        return Answer(num_prompt, num_cached, None, carried)

    async def _stream(self, path: str, body: dict[str, Any], chunks: Chunks, text: list[str]) -> Mapping[str, Any]:
        usage: Mapping[str, Any] = {}
        is_complete = False
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise _failure(response.status_code, await response.aread())
            async for data in event_data(response):
                if data == b"[DONE]":
                    is_complete = True
                    break
                event = _parsed(data)
                if event.get("error"):
                    raise _failure(response.status_code, json.dumps(event).encode())
                for choice in event.get("choices") or ():
                    is_complete |= choice.get("finish_reason") is not None
                    piece = _text_of(choice)
                    if piece or _has_hidden_tokens(choice):
                        chunks.add(choice.get("index", 0), 1)
                        text.append(piece)
                usage = event.get("usage") or usage
        if not is_complete:
            what = "the stream ended before its end" if chunks.times else "the answer is no stream of events"
            raise RequestFailedError("INCOMPLETE_STREAM", f"{what}: neither a finish_reason nor [DONE] came")
        if "completion_tokens" in usage:
            chunks.spread(usage["completion_tokens"])
        return usage

    async def _whole(self, path: str, body: dict[str, Any], chunks: Chunks, text: list[str]) -> Mapping[str, Any]:
        """Beams: most servers do not stream what may change until the end."""
        response = await self._http.post(path, json=body)
        if response.status_code != 200:
            raise _failure(response.status_code, response.content)
        content = response.json()
        for choice in content["choices"]:
            chunks.add(choice["index"], 1)
            text.append(_text_of(choice))
        usage = content.get("usage") or {}
        chunks.spread(usage.get("completion_tokens", len(chunks.tokens)))
        return usage

    def _body(self, request: LoadRequest, history: _History | None) -> tuple[str, dict[str, Any]]:
        is_chat = self._endpoint == "chat" or (self._endpoint is None and isinstance(request.prompt, tuple))
        body: dict[str, Any] = {"model": self._model, "n": request.n, "stream": request.beam_width is None}
        if request.output_len is not None:
            body["max_tokens"] = request.output_len
            if self._ignore_eos:
                body |= {"ignore_eos": True, "min_tokens": request.output_len}
        if request.beam_width is None:
            body |= {**self._sampling, "stream_options": {"include_usage": True}}
        else:
            # The width is n with vLLM, whose beams are all returned.
            body |= {"use_beam_search": True, "n": request.beam_width, "temperature": 0.0}
        if is_chat:
            messages = [message for message, _ in self._planned(request, history)]
            return "/v1/chat/completions", body | {"messages": messages}
        if isinstance(request.prompt, tuple):
            raise RequestFailedError("MESSAGES", "messages need --endpoint chat")
        prompt = request.prompt if isinstance(request.prompt, str) else request.prompt.tolist()
        return "/v1/completions", body | {"prompt": prompt}

    def _planned(self, request: LoadRequest, history: _History | None) -> tuple[tuple[dict[str, str], int], ...]:
        """The messages to send, with the tokens that are planned for each. The oldest are dropped if the prompt would
        be longer than planned."""
        prompt = request.prompt
        if isinstance(prompt, tuple):
            return tuple(({"role": message.role, "content": message.content}, 0) for message in prompt)
        if isinstance(prompt, str):
            return (({"role": "user", "content": prompt}, 0),)
        earlier = () if history is None else history.messages
        new = prompt if history is None or request.num_new_tokens is None else prompt[-request.num_new_tokens :]
        messages = (*earlier, ({"role": "user", "content": _words(new)}, len(new)))
        while len(messages) > 1 and sum(tokens for _, tokens in messages) > len(prompt):
            messages = messages[2:]
        return messages

    async def close(self) -> None:
        await self._http.aclose()


def _why(error: httpx.HTTPError, timeout_s: float) -> str:
    if isinstance(error, httpx.TimeoutException):
        return f"no answer within {timeout_s:g} s"
    return str(error) or type(error).__name__


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Out of range it raises.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and bool(httpx.URL(url))
    except (ValueError, httpx.InvalidURL):
        return False


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        return json.loads(content)
    except ValueError:
        raise RequestFailedError("NO_JSON", f"an event of the stream is no JSON: {content[:80]!r}") from None


def _text_of(choice: Mapping[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message")
    if part is None:
        return str(choice.get("text") or "")
    return str(part.get("content") or part.get("reasoning_content") or part.get("reasoning") or "")


def _has_hidden_tokens(choice: Mapping[str, Any]) -> bool:
    """Whether a choice without text stands for tokens whose text is empty or not certain yet. False for the end, and
    for a choice with only a role, with which many servers begin a chat."""
    return choice.get("finish_reason") is None and "role" not in (choice.get("delta") or {})


def _failure(status: int, content: bytes) -> RequestFailedError:
    """By status and by the error's code or type, as OpenAI has it."""
    try:
        body = json.loads(content)
        error = body.get("error", body)
        kind, message = error.get("code") or error.get("type") or "", error.get("message") or content.decode()
    except (ValueError, AttributeError):
        kind, message = "", content[:200].decode(errors="replace")
    return RequestFailedError(f"HTTP {status}{f' ({kind})' if kind else ''}", " ".join(str(message).split()))


def _words(token_ids: np.ndarray) -> str:
    return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in token_ids.tolist())
