"""OpenAI's completions and chat completions, and vLLM's API for tokens."""

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.api.answers import OPENAI, as_json, client_request_id
from gateway.api.body import BodyLimits, load_json, read_body, validated
from gateway.api.field_rule import FieldRule
from gateway.api.fields import Names, numbered, parse, parse_fields
from gateway.api.front import CallReader, Front, FrontContext
from gateway.api.generation_fields import CompletionBody, GenerationBody, completion_options, is_echo_alone, names_of
from gateway.api.openai.answers import (
    ChatCompletion,
    ChatEvent,
    Completion,
    CompletionEvent,
    DetokenizedText,
    Tokens,
)
from gateway.api.openai.cohere import EmbedBody, EmbedCall, Embedded
from gateway.api.openai.embeddings import Embeddings, EmbeddingsBody, EmbeddingsCall
from gateway.api.openai.ranking import RerankBody, RerankCall, Reranked, ScoreBody, ScoreCall, Scores
from gateway.api.openai.schemas import (
    ChatBody,
    DetokenizeBody,
    TokenizeBody,
    chat_names,
    chat_options,
    chat_prompt,
    completion_prompts,
    kept_tools,
)
from gateway.api.openai.texts_inference import SimilarityBody, TextsBody, TextsCall, TextsRankBody, TextsRankCall
from gateway.api.openai.write_openai import ChatShaper, CompletionShaper, head_of
from gateway.api.openapi import AnyObject, ApiRoute
from gateway.api.respond import Call, FrontEnd, last_event_id, respond, resumed
from gateway.auth.caller import current_caller
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Generator
from gateway.request.limits import MAX_REQUEST_ID_LENGTH
from gateway.request.models import Models
from gateway.request.text_service import TextService
from gateway.request.validation import check_model
from gateway.request.violations import renaming
from gateway.text.fill_in import fill_in_prompt
from gateway.text.tokenizer import Tokenizer
from gateway.turns import Turns
from gateway.types import ChatPrompt, ModelKind, Prompt, RequestOptions, TextPrompt
from quire.rpc.errors import NotFound, invalid_field
from quire.runtime import clock, entropy

BodyType = TypeVar("BodyType", bound=GenerationBody)
# Ids that stay valid with the prefix, the suffix and the number of a prompt.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:-]{1,96}")
# Number of tokens that are written in less than a millisecond.
_FEW = 4096
# The tokenizer class that transformers uses for a tokenizer.json without a tokenizer_config.json.
_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
# Paths on the machine where the model was made, and fields that Quire adds when it reads the model directory.
_NOT_SHOWN = frozenset(
    {"vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "name_or_path", "added_tokens"}
)
_COMPLETIONS, _CHATS, _EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_RERANKS, _SCORES = ("/v1/rerank", "/v2/rerank", "/rerank"), "/v1/score"
_COHERE = ("/v1/embed", "/v2/embed")
_NAMES = {"text": "prompt", "input": "prompt", "token_ids": "tokens"}


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
        options, front_end = completion_options(self._body, None, first_id), self._front_end(self._body)
        turns = Turns()
        requests: list[RequestOptions] = []
        for prompt, request_id in zip(self._prompts, ids, strict=True):
            filled = _with_suffix(prompt, self._body.suffix, generator)
            own = {"prompt": filled, "request_id": request_id, "durable": self._is_durable, "front_end": front_end}
            requests.append(dataclasses.replace(options, **own))
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


def open_front(context: FrontContext) -> Front:
    """Opens the front."""
    models, limits, rule = context.models, context.body_limits, context.body_limits.rule

    async def read_completion(data: bytes) -> tuple[Generator, CompletionCall]:
        body = await parse(CompletionBody, data, limits)
        generator = models.of(body.model, ModelKind.TEXT)
        _note_unlimited(generator, rule, body)
        return generator, CompletionCall(body, body.model or generator.model.name)

    async def read_chat(data: bytes) -> tuple[Generator, ChatCall]:
        body = await parse(ChatBody, data, limits)
        generator = models.of(body.model, ModelKind.TEXT)
        _note_unlimited(generator, rule, body)
        body = _without_unread_switch(generator, rule, body)
        return generator, ChatCall(body, body.model or generator.model.name)

    async def read_embeddings(data: bytes) -> tuple[Generator, EmbeddingsCall]:
        body = await parse(EmbeddingsBody, data, limits)
        generator = models.of(body.model, ModelKind.VECTORS)
        return generator, EmbeddingsCall(body, body.model or generator.model.name)

    async def answered(request: Request, read_call: CallReader, read_back: Callable[[LiveRequest], Call]) -> Response:
        if (last := last_event_id(request)) is not None:
            return resumed(models, last, read_back, context.keep_alive_s, OPENAI)
        return respond(*await read_call(await read_body(request, limits)), context.keep_alive_s)

    async def completions(request: Request) -> Response:
        """Continues one or several prompts."""
        return await answered(request, read_completion, CompletionCall.read_back)

    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await answered(request, read_chat, ChatCall.read_back)

    async def embeddings(request: Request) -> Response:
        """The vectors of texts."""
        return respond(*await read_embeddings(await read_body(request, limits)), context.keep_alive_s)

    async def rerank(request: Request) -> Response:
        """The order of documents for a query."""
        fields, path = await load_json(await read_body(request, limits), limits), request.url.path
        kind = TextsRankBody if path == "/rerank" and isinstance(fields, dict) and "texts" in fields else RerankBody
        body = await parse_fields(kind, fields, limits)
        generator = models.of(body.model, ModelKind.SCORES)
        name = body.model or generator.model.name
        is_plain = isinstance(body, TextsRankBody)
        call = TextsRankCall(body, name) if is_plain else RerankCall(body, name, is_cohere=path.startswith("/v2/"))
        return respond(generator, call, context.keep_alive_s)

    async def embed(request: Request) -> Response:
        """The vectors of texts, in the form of Cohere."""
        body = await parse(EmbedBody, await read_body(request, limits), limits)
        generator = models.of(body.model, ModelKind.VECTORS)
        call = EmbedCall(body, body.model or generator.model.name, 1 if request.url.path.startswith("/v1/") else 2)
        return respond(generator, call, context.keep_alive_s)

    async def embed_texts(request: Request) -> Response:
        """The vectors of texts, in the form of text-embeddings-inference."""
        return await texts_answer(TextsBody, request)

    async def similarity(request: Request) -> Response:
        """The cosines of a text with others, in the form of text-embeddings-inference."""
        return await texts_answer(SimilarityBody, request)

    async def texts_answer(kind: type[TextsBody] | type[SimilarityBody], request: Request) -> Response:
        body = await parse(kind, await read_body(request, limits), limits)
        generator = models.of(body.model, ModelKind.VECTORS)
        return respond(generator, TextsCall(body, body.model or generator.model.name), context.keep_alive_s)

    async def score(request: Request) -> Response:
        """The scores of pairs of texts."""
        body = await parse(ScoreBody, await read_body(request, limits), limits)
        generator = models.of(body.model, ModelKind.SCORES)
        return respond(generator, ScoreCall(body, body.model or generator.model.name), context.keep_alive_s)

    return Front(
        routes=[
            ApiRoute(
                _COMPLETIONS,
                completions,
                method="POST",
                body=CompletionBody,
                answer=Completion,
                events=CompletionEvent,
            ),
            ApiRoute(_CHATS, chat_completions, method="POST", body=ChatBody, answer=ChatCompletion, events=ChatEvent),
            ApiRoute(_EMBEDDINGS, embeddings, method="POST", body=EmbeddingsBody, answer=Embeddings),
            *_text_routes(models, limits),
            *(ApiRoute(path, rerank, method="POST", body=RerankBody, answer=Reranked) for path in _RERANKS),
            *(ApiRoute(path, embed, method="POST", body=EmbedBody, answer=Embedded) for path in _COHERE),
            ApiRoute("/embed", embed_texts, method="POST", body=TextsBody, answer=list[list[float]]),
            ApiRoute("/similarity", similarity, method="POST", body=SimilarityBody, answer=list[float]),
            ApiRoute(_SCORES, score, method="POST", body=ScoreBody, answer=Scores),
        ],
        call_readers={_CHATS: read_chat, _COMPLETIONS: read_completion, _EMBEDDINGS: read_embeddings},
        # Other paths below /v2 are of KServe, whose errors have another form.
        dialect_of=lambda scope: OPENAI if scope["path"] in (*_RERANKS, *_COHERE) else None,
    )


def _note_unlimited(generator: Generator, rule: FieldRule, body: GenerationBody) -> None:
    """Records a reasoning budget as ignored if the model's answers have no reasoning."""
    if body.thinking_token_budget is not None and generator.model.chat.reasoning_format is None:
        rule.note(body.api, "thinking_token_budget")


def _without_unread_switch(generator: Generator, rule: FieldRule, body: ChatBody) -> ChatBody:
    """Removes the switch for thinking if the chat template does not read it, and records it as ignored."""
    template = generator.model.chat.template
    if body.enable_thinking is None or body.chat_template is not None or template is None or rule.is_strict:
        return body
    if "enable_thinking" in template.variables:
        return body
    rule.note(body.api, "enable_thinking")
    return body.model_copy(update={"enable_thinking": None})


def _text_routes(models: Models, body_limits: BodyLimits) -> list[ApiRoute]:
    texts = TextService(models)

    async def tokenize(request: Request) -> Response:
        """The tokens of a prompt or a conversation."""
        body = await parse(TokenizeBody, await read_body(request, body_limits), body_limits)
        with renaming(lambda: Names(_NAMES | numbered("tools", kept_tools(body)))):
            tokenized = await texts.tokenize(
                body.model or None, _tokenize_input(body), add_special_tokens=body.add_special_tokens is not False
            )
        answer: Tokens = {
            "count": len(tokenized.token_ids),
            "max_model_len": tokenized.max_model_len,
            "tokens": tokenized.token_ids,
            "token_strs": tokenized.tokens if body.return_token_strs else None,
        }
        return await _json_response(answer, len(tokenized.token_ids))

    async def detokenize(request: Request) -> Response:
        """The text of tokens."""
        body = await parse(DetokenizeBody, await read_body(request, body_limits), body_limits)
        with renaming(lambda: Names(_NAMES)):
            text = await texts.detokenize(body.model or None, body.tokens, include_special_tokens=True)
        answer: DetokenizedText = {"prompt": text}
        return await _json_response(answer, len(body.tokens))

    async def tokenizer_info(request: Request) -> AnyObject:
        """The tokenizer's configuration and the chat template, in the form of tokenizer_config.json."""
        named = request.query_params.get("model")
        model = (models.of(None) if named is None else models.named(named)).model
        check_model(model.name, current_caller().visible(model.name), NotFound)
        config = {name: _plain(value) for name, value in model.tokenizer_config.items() if name not in _NOT_SHOWN}
        config.setdefault("tokenizer_class", _TOKENIZER_CLASS)
        return config if model.chat.template is None else config | {"chat_template": model.chat.template.source}

    return [
        ApiRoute("/tokenize", tokenize, method="POST", body=TokenizeBody, answer=Tokens),
        ApiRoute("/detokenize", detokenize, method="POST", body=DetokenizeBody, answer=DetokenizedText),
        ApiRoute("/tokenizer_info", tokenizer_info),
    ]


async def _json_response(answer: Mapping[str, Any], num_tokens: int) -> Response:
    """Writes an answer with many tokens in a thread, so that other calls continue."""
    data = as_json(answer) if num_tokens <= _FEW else await asyncio.to_thread(as_json, answer)
    return Response(data, media_type="application/json")


def _plain(value: Any) -> Any:
    """A value of tokenizer_config.json, in which tokens that are objects are replaced by their texts."""
    match value:
        case {"content": str(content)}:
            return content
        case Mapping():
            return {name: _plain(each) for name, each in value.items()}
        case list():
            return [_plain(each) for each in value]
    return value


def _tokenize_input(body: TokenizeBody) -> TextPrompt | ChatPrompt:
    if body.prompt is not None and body.messages is not None:
        raise invalid_field("prompt", "is set together with messages; set exactly one of them")
    if body.messages is not None:
        return chat_prompt(body.messages, body)
    if body.prompt is None:
        raise invalid_field("prompt", "is missing; set prompt or messages")
    return TextPrompt(body.prompt)
