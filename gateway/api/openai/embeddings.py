"""OpenAI's embeddings: the vectors of texts, from a model that gives vectors instead of texts."""

import base64
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

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
from gateway.request.violations import Violations
from gateway.types import ModelKind, Prompt, RequestOptions, TextPrompt, TokenPrompt
from quire.common.v1.common_pb2 import SamplingParameters, StoppingParameters
from quire.rpc.errors import Unavailable, invalid_field
from quire.runtime import entropy

# A vector or a score takes one token, which has no meaning.
_ONE_TOKEN = StoppingParameters(max_tokens=1, ignore_eos=True)
_GREEDY = SamplingParameters(temperature=0.0, seed=0)


def vector_options(
    kind: ModelKind, model: str | None, priority: int | None, *, truncate: bool | None
) -> RequestOptions:
    """A request for a vector or a score, without its prompt."""
    return RequestOptions(
        None,
        model=model or None,
        sampling=_GREEDY,
        stopping=_ONE_TOKEN,
        priority=priority,
        priority_sign=-1,
        kind=kind,
        cuts_text=bool(truncate),
    )


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
        elif not isinstance(self.input, str) and not self.input:
            violations.add("input", "is empty; it must have at least one text")


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


class EmbeddingsCall(Call):
    """Each text is a request of its own."""

    streams = False

    def __init__(self, body: EmbeddingsBody, model: str) -> None:
        self.id = f"embd-{entropy.random_hex(16)}"
        self._body, self._model = body, model
        self._is_list = not isinstance(body.input, str) and not isinstance(cast(Any, body.input)[0], int)

    async def requests(self, generator: Generator) -> list[RequestOptions]:
        body, files = self._body, generator.model.embedding
        if files is not None:
            size = generator.model.vector_size
            if body.dimensions is not None and not 1 <= body.dimensions <= size:
                raise invalid_field(
                    "dimensions", f"is {body.dimensions}; vectors of this model have {size} numbers: use 1 to {size}"
                )
            if body.prompt_name is not None and body.prompt_name not in files.prompts:
                known = ", ".join(files.prompts) or "none"
                raise invalid_field("prompt_name", f'is "{body.prompt_name:.80}"; the model has the prompts {known}')
        options = vector_options(ModelKind.VECTORS, body.model, body.priority, truncate=body.truncate)
        name = body.prompt_name or (None if files is None else files.default_prompt)
        before = "" if files is None or name is None else files.prompts[name]
        return [dataclasses.replace(options, prompt=each) for each in _prompts(body, before)]

    def names(self, position: int) -> Names:
        field = f"input[{position}]" if self._is_list else "input"
        return Names({"prompt": field, "text": field, "token_ids": field})

    async def shaper(self, generator: Generator, live: Sequence[LiveRequest]) -> "EmbeddingsShaper":
        return EmbeddingsShaper(self._body, self._model)


def _prompts(body: EmbeddingsBody, before: str) -> list[Prompt]:
    """The texts, each with the text `before` it; a list of numbers is one text."""
    given = body.input
    assert given is not None
    if isinstance(given, str):
        return [TextPrompt(before + given)]
    if isinstance(given[0], int):
        return [TokenPrompt(cast(list[int], given))]
    texts = cast(list[str] | list[list[int]], given)
    return [TextPrompt(before + each) if isinstance(each, str) else TokenPrompt(each) for each in texts]


def vector_of(end: Finished, dimensions: int | None = None) -> NDArray[np.float32]:
    """The vector of a text; its first `dimensions` numbers, scaled to the length 1, if they are given. Raises
    Unavailable if its scheduler was lost between the token and the vector."""
    if not end.vector:
        raise Unavailable("the scheduler was lost while it answered; send the request again", reason="WORKER_LOST")
    vector = np.frombuffer(end.vector, np.float32)
    if dimensions is None or dimensions == len(vector):
        return vector
    vector = vector[:dimensions]
    length = np.float32(np.linalg.norm(vector))
    return (vector / length).astype(np.float32) if length > 0 else vector


class WholeShaper:
    """The part of a shaper whose answers are never streams."""

    def begin(self) -> Iterable[Mapping[str, Any]]:
        return ()

    def event(self, position: int, event: Chunk | Finished) -> Iterable[Mapping[str, Any]]:
        return ()

    def end(self, usages: Sequence[Usage]) -> Iterable[Mapping[str, Any]]:
        return ()


class EmbeddingsShaper(WholeShaper):
    """Writes the answer."""

    def __init__(self, body: EmbeddingsBody, model: str) -> None:
        self._body, self._model = body, model

    def whole(self, results: Sequence[Result]) -> Mapping[str, Any]:
        num_tokens = sum(usage.prompt_tokens for _, usage in results)
        vectors = [vector_of(sequences[0].finished, self._body.dimensions) for sequences, _ in results]
        answer: Embeddings = {
            "object": "list",
            "data": LazyList(lambda: map(self._entry, range(len(vectors)), vectors)),
            "model": self._model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return answer

    def _entry(self, index: int, vector: NDArray[np.float32]) -> Embedding:
        if self._body.encoding_format == "base64":
            return {"object": "embedding", "index": index, "embedding": base64.b64encode(vector.tobytes()).decode()}
        return {"object": "embedding", "index": index, "embedding": vector.astype(np.float64).tolist()}
