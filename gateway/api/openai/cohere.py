"""Cohere's API: embeddings of texts in several number formats. Ranks have the same form as Jina's (`ranking`)."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict

from gateway.api import field_rule
from gateway.api.answers import LazyList
from gateway.api.field_rule import FieldRule, Unread
from gateway.api.fields import Names
from gateway.api.generation_fields import Body, ListOf
from gateway.api.openai.embeddings import VectorsCall
from gateway.request.generator import Generator, Result
from gateway.request.vectors import VectorCall, Vectors, check_count, requests_for_texts
from gateway.request.violations import Violations
from gateway.types import ModelKind, RequestOptions
from quire.rpc.errors import invalid_field

NumberFormat = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_BITS = ("binary", "ubinary")
# Names of the prompts of models for each type of input, as sentence-transformers and its models have them.
_PROMPTS: Mapping[str, Sequence[str]] = {
    "search_query": ("query", "search_query"),
    "search_document": ("document", "passage", "corpus", "search_document"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}


class EmbedBody(Body):
    """Texts. `input_type` chooses one of the model's prompts, if the model has one for it."""

    api: ClassVar[str] = "embed"
    unread: ClassVar[Unread] = field_rule.COHERE_EMBED

    texts: ListOf[str]
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    embedding_types: ListOf[NumberFormat] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    output_dimension: int | None = None
    priority: int | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        check_count(violations, "texts", len(self.texts), "text")


class BilledUnits(TypedDict, total=False):
    input_tokens: int
    search_units: int


class Meta(TypedDict):
    api_version: dict[str, str]
    billed_units: BilledUnits


Numbers = Iterable[list[float] | list[int] | str]


class Embedded(TypedDict):
    """With `embeddings_floats`, which only the first version of the API has, the vectors of one format."""

    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: Mapping[NumberFormat, Numbers] | Numbers
    texts: list[str]
    meta: Meta


def meta_of(units: BilledUnits, version: Literal[1, 2] = 2) -> Meta:
    return {"api_version": {"version": str(version)}, "billed_units": units}


class EmbedCall(VectorsCall[EmbedBody]):
    """Cohere's call, of the first or the second version of its API."""

    def __init__(self, body: EmbedBody, model: str, version: Literal[1, 2] = 2) -> None:
        super().__init__(body, model)
        self._version: Literal[1, 2] = version

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        body, files = self.body, generator.model.embedding
        prompts = {} if files is None else files.prompts
        call = VectorCall(
            body.model,
            body.priority,
            priority_sign=-1,
            truncate=body.truncate != "NONE",
            cuts_start=body.truncate == "START",
            dimensions=body.output_dimension,
            prompt_name=next((name for name in _PROMPTS.get(body.input_type or "", ()) if name in prompts), None),
        )
        requests = requests_for_texts(generator, body.texts, call)
        generator.check_kind(call.options(ModelKind.VECTORS))
        size = body.output_dimension or generator.model.vector_size
        if size % 8 and any(each in _BITS for each in body.embedding_types or ()):
            numbers = (
                f"packs 8 numbers into one, and the vectors have {size}; output_dimension makes it a multiple of 8"
            )
            raise invalid_field("embedding_types", numbers)
        return requests

    def field(self, position: int) -> str:
        return f"texts[{position}]"

    def names(self, position: int) -> Names:
        names = super().names(position)
        return Names({**names.begins, "dimensions": "output_dimension"})

    def _types(self) -> Iterable[NumberFormat]:
        return dict.fromkeys(self.body.embedding_types) if self.body.embedding_types else ("float",)

    def answer(self, results: Sequence[Result]) -> Mapping[str, Any]:
        found = Vectors.of(self.model, results, self.body.output_dimension)
        by_type: dict[NumberFormat, Numbers] = {
            each: LazyList(lambda write=_WRITERS[each]: map(write, found.vectors)) for each in self._types()
        }
        is_plain = self._version == 1 and not self.body.embedding_types
        answer: Embedded = {
            "id": self.id,
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
            "embeddings": by_type["float"] if is_plain else by_type,
            "texts": self.body.texts,
            "meta": meta_of({"input_tokens": sum(found.num_tokens)}, self._version),
        }
        return answer


def _int8(vector: NDArray[np.float32]) -> NDArray[np.int8]:
    """The vector with 127 as its largest absolute number, so that the cosine stays."""
    largest = np.abs(vector).max()
    return np.rint(vector * (127 / largest) if largest > 0 else vector).astype(np.int8)


_WRITERS: Mapping[NumberFormat, Callable[[NDArray[np.float32]], list[float] | list[int] | str]] = {
    "float": lambda vector: vector.astype(np.float64).tolist(),
    "int8": lambda vector: _int8(vector).tolist(),
    "uint8": lambda vector: (_int8(vector).astype(np.int16) + 128).tolist(),
    "binary": lambda vector: (np.packbits(vector > 0).astype(np.int16) - 128).tolist(),
    "ubinary": lambda vector: np.packbits(vector > 0).tolist(),
    "base64": lambda vector: base64.b64encode(vector.tobytes()).decode(),
}
