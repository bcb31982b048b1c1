"""Rerank, in the form of Jina and Cohere, and vLLM's scores: how well documents fit a query."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, NotRequired, TypeVar

from typing_extensions import TypedDict

from gateway.api import field_rule
from gateway.api.answers import LazyList
from gateway.api.field_rule import FieldRule, Part, Unread
from gateway.api.generation_fields import Body, ListOf
from gateway.api.openai.cohere import Meta, meta_of
from gateway.api.openai.embeddings import EmbeddingsUsage, VectorsCall
from gateway.request.generator import Generator, Result
from gateway.request.vectors import (
    VectorCall,
    Vectors,
    best_first,
    check_count,
    check_pairs,
    check_positive,
    paired,
    requests_for_pairs,
)
from gateway.request.violations import Violations
from gateway.types import RequestOptions
from quire.runtime import clock


class TextDocument(Part):
    """A document as an object."""

    unread: ClassVar[Unread] = field_rule.RANKING

    text: str


class RankingBody(Body):
    """The common fields of both calls."""

    unread: ClassVar[Unread] = field_rule.RANKING

    truncate: bool | None = None
    priority: int | None = None


class RerankBody(RankingBody):
    """Documents to put in order. `truncate` and `priority` are extensions."""

    api: ClassVar[str] = "rerank"

    query: str
    documents: ListOf[str | TextDocument]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        check_count(violations, "documents", len(self.documents), "document")
        check_positive(violations, "top_n", self.top_n)
        check_positive(violations, "max_tokens_per_doc", self.max_tokens_per_doc)


class ScoreBody(RankingBody):
    """Pairs of texts to score: one first text with each second one, or as many of both."""

    api: ClassVar[str] = "score"

    text_1: str | ListOf[str]
    text_2: str | ListOf[str]

    def check(self, violations: Violations, rule: FieldRule) -> None:
        check_pairs(violations, len(_as_list(self.text_1)), len(_as_list(self.text_2)))


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
    meta: NotRequired[Meta]


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


BodyType = TypeVar("BodyType", bound=RankingBody)


class PairsCall(VectorsCall[BodyType]):
    """A call whose pairs of texts are requests of their own."""

    @property
    @abstractmethod
    def pairs(self) -> Sequence[tuple[str, str]]:
        """The texts."""

    @property
    def fields(self) -> VectorCall:
        """The fields that hold for all pairs."""
        return VectorCall(self.body.model, self.body.priority, priority_sign=-1, truncate=bool(self.body.truncate))

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        return await requests_for_pairs(generator, self.pairs, self.fields)

    @abstractmethod
    def scored(self, head: Mapping[str, Any], scores: Sequence[float]) -> Mapping[str, Any] | LazyList[Any]:
        """The answer, from its first fields and the score of each pair."""

    def answer(self, results: Sequence[Result]) -> Mapping[str, Any] | LazyList[Any]:
        found = Vectors.of(self.model, results)
        num_tokens = sum(found.num_tokens)
        usage: EmbeddingsUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return self.scored({"id": self.id, "object": "list", "model": self.model, "usage": usage}, found.scores)


class RerankCall(PairsCall[RerankBody]):
    """In Cohere's form the answer has the field `meta`, and documents that are too long are cut unless `truncate` is
    false."""

    def __init__(self, body: RerankBody, model: str, *, is_cohere: bool = False) -> None:
        super().__init__(body, model)
        self._is_cohere = is_cohere
        self._meta = {"meta": meta_of({"search_units": 1})} if is_cohere else {}

    @property
    def fields(self) -> VectorCall:
        truncate = self._is_cohere if self.body.truncate is None else self.body.truncate
        return replace(super().fields, truncate=truncate, max_document_tokens=self.body.max_tokens_per_doc)

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        return [(self.body.query, _text_of(each)) for each in self.body.documents]

    def field(self, position: int) -> str:
        return f"documents[{position}]"

    def scored(self, head: Mapping[str, Any], scores: Sequence[float]) -> Mapping[str, Any]:
        def entry(index: int) -> RankedDocument:
            ranked: RankedDocument = {"index": index, "relevance_score": scores[index]}
            if self.body.return_documents:
                ranked["document"] = {"text": _text_of(self.body.documents[index])}
            return ranked

        return {**head, **self._meta, "results": LazyList(lambda: map(entry, best_first(scores, self.body.top_n)))}


class ScoreCall(PairsCall[ScoreBody]):
    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        return paired(_as_list(self.body.text_1), _as_list(self.body.text_2))

    def field(self, position: int) -> str:
        return "text_2" if isinstance(self.body.text_2, str) else f"text_2[{position}]"

    def scored(self, head: Mapping[str, Any], scores: Sequence[float]) -> Mapping[str, Any]:
        def entry(index: int) -> Score:
            return {"object": "score", "index": index, "score": scores[index]}

        return {**head, "created": int(clock.unix_s()), "data": LazyList(lambda: map(entry, range(len(scores))))}


def _text_of(document: str | TextDocument) -> str:
    return document if isinstance(document, str) else document.text


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
