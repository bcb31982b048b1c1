"""OpenAI's embeddings: the vectors of texts, from a model that gives vectors instead of texts."""

import base64
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from gateway.api import field_rule
from gateway.api.answers import LazyList
from gateway.api.field_rule import FieldRule, Unread
from gateway.api.fields import Names
from gateway.api.generation_fields import Body, ListOf
from gateway.api.respond import Call
from gateway.replicas.events import Chunk, Finished, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.generator import Generator, Result
from gateway.request.vectors import VectorCall, Vectors, check_count, new_call_id, requests_for_texts, vector_results
from gateway.request.violations import Violations
from gateway.types import RequestOptions

BodyType = TypeVar("BodyType", bound=Body)


class EmbeddingsBody(Body):
    """`prompt_name` and `truncate` are extensions: of the model's prompts the one that is put before each text, and
    whether a text that is too long is cut."""

    api: ClassVar[str] = "embeddings"
    unread: ClassVar[Unread] = field_rule.EMBEDDINGS

    input: str | ListOf[str] | ListOf[int] | ListOf[ListOf[int]] | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None

    prompt_name: str | None = None
    truncate: bool | None = None
    priority: int | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        if self.input is None:
            violations.add("input", "is missing")
        elif not isinstance(self.input, str) and not (self.input and isinstance(self.input[0], int)):
            check_count(violations, "input", len(self.input), "text")


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: Iterable[float] | str


class EmbeddingsUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    object: Literal["list"]
    data: Iterable[Embedding]
    model: str
    usage: EmbeddingsUsage


class VectorsCall(Call, Generic[BodyType]):
    """A call whose texts, or pairs of texts, are requests of their own. The answer comes as a whole."""

    streams = False

    def __init__(self, body: BodyType, model: str) -> None:
        self.id = new_call_id(body.api)
        self.body, self.model = body, model

    @abstractmethod
    def field(self, position: int) -> str:
        """The field of the body that has a text."""

    @abstractmethod
    def answer(self, results: Sequence[Result]) -> Mapping[str, Any] | LazyList[Any]:
        """The answer from the results of all texts."""

    def names(self, position: int) -> Names:
        return Names(dict.fromkeys(("prompt", "text", "token_ids"), self.field(position)))

    async def results(self, live: Sequence[LiveRequest]) -> list[Result]:
        return await vector_results(live, self.field)

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> "WholeShaper":
        return WholeShaper(self.answer)


@dataclass(frozen=True, slots=True)
class WholeShaper:
    """A shaper whose answers are never streams."""

    _answer: Callable[[Sequence[Result]], Mapping[str, Any] | LazyList[Any]]

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any] | LazyList[Any]:
        return self._answer(results)

    def begin(self) -> Iterable[Mapping[str, Any]]:
        return ()

    def event(self, position: int, event: Chunk | Finished) -> Iterable[Mapping[str, Any]]:
        return ()

    def repeats_form(self, sequence_index: int) -> bool:
        return False

    def end(self, usages: Sequence[Usage]) -> Iterable[Mapping[str, Any]]:
        return ()


class EmbeddingsCall(VectorsCall[EmbeddingsBody]):
    """OpenAI's call."""

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        body = self.body
        call = VectorCall(
            body.model,
            body.priority,
            priority_sign=-1,
            truncate=bool(body.truncate),
            dimensions=body.dimensions,
            prompt_name=body.prompt_name,
        )
        return requests_for_texts(generator, _texts(body), call)

    def field(self, position: int) -> str:
        is_one = isinstance(self.body.input, str) or isinstance(cast(Any, self.body.input)[0], int)
        return "input" if is_one else f"input[{position}]"

    def answer(self, results: Sequence[Result]) -> Mapping[str, Any]:
        found = Vectors.of(self.model, results, self.body.dimensions)
        vectors, num_tokens = found.vectors, sum(found.num_tokens)
        answer: Embeddings = {
            "object": "list",
            "data": LazyList(lambda: map(self._entry, range(len(vectors)), vectors)),
            "model": self.model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return answer

    def _entry(self, index: int, vector: NDArray[np.float32]) -> Embedding:
        if self.body.encoding_format == "base64":
            return {"object": "embedding", "index": index, "embedding": base64.b64encode(vector.tobytes()).decode()}
        return {"object": "embedding", "index": index, "embedding": vector.astype(np.float64).tolist()}


def _texts(body: EmbeddingsBody) -> list[str] | list[list[int]]:
    """The texts; a list of numbers is one text."""
    given = body.input
    assert given is not None
    if isinstance(given, str):
        return [given]
    return [given] if isinstance(given[0], int) else given
