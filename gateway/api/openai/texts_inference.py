"""The API of Hugging Face's text-embeddings-inference: vectors, similarities and ranks as plain lists."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gateway.api import field_rule
from gateway.api.answers import LazyList
from gateway.api.field_rule import FieldRule, Part, Unread
from gateway.api.generation_fields import Body, ListOf
from gateway.api.openai.embeddings import VectorsCall
from gateway.api.openai.ranking import PairsCall, RankingBody
from gateway.request.generator import Generator, Result
from gateway.request.vectors import VectorCall, Vectors, best_first, check_count, requests_for_texts
from gateway.request.violations import Violations
from gateway.types import RequestOptions

Side = Literal["left", "right", "Left", "Right"]


class Similar(Part):
    """A text, and the texts to compare with it."""

    unread: ClassVar[Unread] = field_rule.TEXTS_INFERENCE

    source_sentence: str
    sentences: ListOf[str]


class TextsBody(Body):
    """Texts. The vectors have the length 1 unless `normalize` is false: then they are as the model makes them."""

    api: ClassVar[str] = "texts"
    unread: ClassVar[Unread] = field_rule.TEXTS_INFERENCE
    union_types: ClassVar[Mapping[str, str]] = {"inputs": "a string or a list of strings"}

    inputs: str | ListOf[str]
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Side | None = None
    prompt_name: str | None = None
    dimensions: int | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        if not isinstance(self.inputs, str):
            check_count(violations, "inputs", len(self.inputs), "text")


class SimilarityBody(Body):
    """A text to compare with others."""

    api: ClassVar[str] = "similarity"
    unread: ClassVar[Unread] = field_rule.TEXTS_INFERENCE

    inputs: Similar

    def check(self, violations: Violations, rule: FieldRule) -> None:
        # The text is one of the call's, too.
        count = len(self.inputs.sentences)
        check_count(violations, "inputs.sentences", count + bool(count), "text")


class TextsRankBody(RankingBody):
    """Texts to put in order; `raw_scores` is refused, since a model has one function of its scores."""

    api: ClassVar[str] = "rerank"
    unread: ClassVar[Unread] = field_rule.TEXTS_INFERENCE

    query: str
    texts: ListOf[str]
    return_text: bool | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        check_count(violations, "texts", len(self.texts), "text")


class TextsCall(VectorsCall[TextsBody | SimilarityBody]):
    """The answer is a list of vectors, or of cosines."""

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        body = self.body
        if isinstance(body, SimilarityBody):
            texts = [body.inputs.source_sentence, *body.inputs.sentences]
            return requests_for_texts(generator, texts, VectorCall(body.model))
        call = VectorCall(
            body.model,
            truncate=bool(body.truncate),
            cuts_start=(body.truncation_direction or "").lower() == "left",
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
        )
        return requests_for_texts(generator, [body.inputs] if isinstance(body.inputs, str) else body.inputs, call)

    def field(self, position: int) -> str:
        if isinstance(self.body, SimilarityBody):
            return f"inputs.sentences[{position - 1}]" if position else "inputs.source_sentence"
        return "inputs" if isinstance(self.body.inputs, str) else f"inputs[{position}]"

    def answer(self, results: Sequence[Result]) -> LazyList[Any]:
        body = self.body
        vectors = Vectors.of(self.model, results, None if isinstance(body, SimilarityBody) else body.dimensions).vectors
        if isinstance(body, SimilarityBody):
            source, *others = map(_scaled, vectors)
            return LazyList(lambda: [float(source @ other) for other in others])
        made = vectors if body.normalize is False else map(_scaled, vectors)
        return LazyList(lambda: (vector.astype(np.float64).tolist() for vector in made))


class TextsRankCall(PairsCall[TextsRankBody]):
    """Each pair of the query and a text is a request of its own."""

    @property
    def pairs(self) -> Sequence[tuple[str, str]]:
        return [(self.body.query, each) for each in self.body.texts]

    def field(self, position: int) -> str:
        return f"texts[{position}]"

    def scored(self, head: Any, scores: Sequence[float]) -> LazyList[Any]:
        def entries() -> Iterable[Any]:
            for index in best_first(scores, None):
                shown: Any = {"text": self.body.texts[index]} if self.body.return_text else {}
                yield {"index": index, "score": scores[index], **shown}

        return LazyList(entries)


def _scaled(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    length = np.float32(np.linalg.norm(vector))
    return (vector / length).astype(np.float32) if length > 0 else vector
