"""Rerank, in the form of Jina and Cohere, and vLLM's scores: how well documents fit a query."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, NotRequired, TypeVar, cast

from typing_extensions import TypedDict

from gateway.api import field_rule
from gateway.api.answers import LazyList
from gateway.api.field_rule import FieldRule, Part, Unread
from gateway.api.fields import Names
from gateway.api.generation_fields import Body, ListOf
from gateway.api.openai.embeddings import EmbeddingsUsage, WholeShaper, vector_of, vector_options
from gateway.api.respond import Call
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Generator, Result
from gateway.request.limits import MAX_TEXTS
from gateway.request.violations import Violations
from gateway.turns import Turns
from gateway.types import ModelKind, RequestOptions, TokenPrompt
from quire.rpc.errors import InvalidArgument
from quire.runtime import clock, entropy


class TextDocument(Part):
    """A document as an object."""

    unread: ClassVar[Unread] = field_rule.RANKING

    text: str


class _RankingBody(Body):
    unread: ClassVar[Unread] = field_rule.RANKING

    truncate: bool | None = None
    priority: int | None = None


class RerankBody(_RankingBody):
    """Documents to put in order. `truncate` and `priority` are extensions."""

    api: ClassVar[str] = "rerank"

    query: str
    documents: ListOf[str | TextDocument]
    top_n: int | None = None
    return_documents: bool | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        if not self.documents:
            violations.add("documents", "is empty; it must have at least one document")
        if len(self.documents) > MAX_TEXTS:
            violations.add("documents", f"has {len(self.documents):,} entries; the max is {MAX_TEXTS:,}")
        if self.top_n is not None and self.top_n < 1:
            violations.add("top_n", f"is {self.top_n}; it must be at least 1")


class ScoreBody(_RankingBody):
    """Pairs of texts to score: one first text with each second one, or as many of both."""

    api: ClassVar[str] = "score"

    text_1: str | ListOf[str]
    text_2: str | ListOf[str]

    def check(self, violations: Violations, rule: FieldRule) -> None:
        first, second = _as_list(self.text_1), _as_list(self.text_2)
        if not second or len(first) not in (1, len(second)):
            violations.add(
                "text_1",
                f"has {len(first):,} texts, and text_2 {len(second):,}; text_1 must be one text, or both as many",
            )


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[dict[str, str]]


class Reranked(TypedDict):
    id: str
    object: Literal["list"]
    model: str
    results: Iterable[RankedDocument]
    usage: EmbeddingsUsage


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: Iterable[Score]
    usage: EmbeddingsUsage


BodyType = TypeVar("BodyType", bound=_RankingBody)


class _PairsCall(Call, Generic[BodyType]):
    """Each pair of texts is a request of its own."""

    streams = False

    def __init__(self, body: BodyType, model: str) -> None:
        self.id = f"{body.api}-{entropy.random_hex(16)}"
        self.body, self._model = body, model

    @property
    @abstractmethod
    def pairs(self) -> Sequence[tuple[str, str]]:
        """The texts."""

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        body = self.body
        options = vector_options(ModelKind.SCORES, body.model, body.priority, truncate=body.truncate)
        generator.check_kind(options)
        # A query is tokenized again with each document.
        pairs, limit, made = self.pairs, (await generator.limits()).max_message_bytes, generator.model.pairs
        assert made is not None, "a model that ranks"
        if (size := sum(len(first) + len(second) for first, second in pairs)) > limit:
            raise InvalidArgument(
                f"the pairs of this call have {size:,} characters, each text counted in each of its pairs; the max is "
                f"{limit:,}: send fewer or shorter texts"
            )
        turns = Turns()
        requests: list[RequestOptions] = []
        for first, second in pairs:
            ids = await made.encode(first, second)
            requests.append(replace(options, prompt=TokenPrompt(ids)))
            await turns.pause()
        return requests

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> "_PairsShaper":
        return _PairsShaper(self)

    @abstractmethod
    def answer(self, head: Mapping[str, Any], scores: Sequence[float]) -> Mapping[str, Any]:
        """The answer, from its first fields and the score of each pair."""

    def head(self, num_tokens: int) -> Mapping[str, Any]:
        usage: EmbeddingsUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"id": self.id, "object": "list", "model": self._model, "usage": usage}


class RerankCall(_PairsCall[RerankBody]):
    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        return [(self.body.query, _text_of(each)) for each in self.body.documents]

    def names(self, position: int) -> Names:
        field = f"documents[{position}]"
        return Names({"prompt": field, "token_ids": field})

    def answer(self, head: Mapping[str, Any], scores: Sequence[float]) -> Mapping[str, Any]:
        best_first = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.body.top_n]

        def entry(index: int) -> RankedDocument:
            ranked: RankedDocument = {"index": index, "relevance_score": scores[index]}
            if self.body.return_documents:
                ranked["document"] = {"text": _text_of(self.body.documents[index])}
            return ranked

        return {**head, "results": LazyList(lambda: map(entry, best_first))}


class ScoreCall(_PairsCall[ScoreBody]):
    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        first, second = _as_list(self.body.text_1), _as_list(self.body.text_2)
        return list(zip(first if len(first) == len(second) else first * len(second), second, strict=True))

    def names(self, position: int) -> Names:
        field = "text_2" if isinstance(self.body.text_2, str) else f"text_2[{position}]"
        return Names({"prompt": field, "token_ids": field})

    def answer(self, head: Mapping[str, Any], scores: Sequence[float]) -> Mapping[str, Any]:
        def entry(index: int) -> Score:
            return {"object": "score", "index": index, "score": scores[index]}

        return {**head, "created": int(clock.unix_s()), "data": LazyList(lambda: map(entry, range(len(scores))))}


class _PairsShaper(WholeShaper):
    """Writes the answer."""

    def __init__(self, call: _PairsCall[Any]) -> None:
        self._call = call

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        num_tokens = sum(usage.prompt_tokens for _, usage in results)
        scores = [float(vector_of(sequences[0].finished)[0]) for sequences, _ in results]
        return self._call.answer(self._call.head(num_tokens), scores)


def _text_of(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else cast(list[str], texts)
