"""Vectors of texts and scores of pairs of texts, for all APIs: the requests of a call, and what their results say.

Each text, and each pair, is a request of its own with one token of output, which has no meaning (ADR 92).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from gateway.replicas.events import Finished
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import AS_MESSAGE
from gateway.request.generator import Generator, Result, running
from gateway.request.limits import MAX_TEXTS
from gateway.request.violations import Violations, renamed
from gateway.turns import Turns
from gateway.types import ModelKind, RequestOptions, TextPrompt, TokenPrompt
from quire.common.v1.common_pb2 import SamplingParameters, StoppingParameters
from quire.rpc.errors import FieldViolation, Internal, InvalidArgument, QuireError, Unavailable, invalid_field
from quire.runtime import entropy

Names = Callable[[int], Callable[[str], str]]
"""Maps the position of a request to a function that maps a field of the validator to the caller's name of it."""

_ONE_TOKEN = StoppingParameters(max_tokens=1, ignore_eos=True)
_GREEDY = SamplingParameters(temperature=0.0, seed=0)
_NO_VECTOR = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class VectorCall:
    """The fields of a call that hold for all of its texts.

    Attributes:
        truncate: Whether a text that is too long is cut; else it is refused.
        cuts_start: Whether it is cut at its beginning, not at its end.
        dimensions: The number of first numbers of each vector to return, scaled to the length 1; None returns all.
        prompt_name: The prompt of the model that is put before each text; None puts the model's default.
        max_document_tokens: The number of tokens after which the second text of a pair is cut; None cuts none.
    """

    model: str | None = None
    priority: int | None = None
    priority_sign: Literal[1, -1] = 1
    truncate: bool = False
    cuts_start: bool = False
    dimensions: int | None = None
    prompt_name: str | None = None
    max_document_tokens: int | None = None

    def options(self, kind: ModelKind) -> RequestOptions:
        """A request without its prompt."""
        return RequestOptions(
            None,
            model=self.model or None,
            sampling=_GREEDY,
            stopping=_ONE_TOKEN,
            priority=self.priority,
            priority_sign=self.priority_sign,
            kind=kind,
            cuts_text=("start" if self.cuts_start else "end") if self.truncate else None,
        )


@dataclass(frozen=True, slots=True)
class Vectors:
    """The results of a call, in the order of its texts: vectors of float32, and the numbers of tokens; and the name of
    the model. A text whose vector is not finite has an empty vector, and no tokens."""

    model: str
    vectors: list[NDArray[np.float32]]
    num_tokens: list[int]

    @classmethod
    def of(cls, model: str, results: Sequence[Result | None], dimensions: int | None = None) -> Self:
        """Raises Unavailable if the scheduler of a request was lost between the token and the vector."""
        return cls(
            model,
            [_vector_of(each[0][0].finished, dimensions) if each else _NO_VECTOR for each in results],
            [each[1].prompt_tokens if each else 0 for each in results],
        )

    @property
    def scores(self) -> list[float]:
        """The scores of pairs, which are vectors of one number."""
        return [float(vector[0]) for vector in self.vectors]


def check_count(violations: Violations, field: str, count: int, noun: str) -> None:
    """Checks the number of texts in `field`."""
    if not count:
        violations.add(field, f"is empty; it must have at least one {noun}")
    if count > MAX_TEXTS:
        violations.add(field, f"has {count:,} entries; the max is {MAX_TEXTS:,}")


def check_pairs(violations: Violations, num_first: int, num_second: int) -> None:
    """Checks the numbers of texts to pair: one first text with each second one, or as many of both."""
    if not num_second or num_first not in (1, num_second):
        numbers = f"has {num_first:,} texts, and text_2 {num_second:,}"
        violations.add("text_1", f"{numbers}; text_1 must be one text, or both as many")


def paired(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    """The pairs of texts that `check_pairs` accepts."""
    return list(zip(first if len(first) == len(second) else [*first] * len(second), second, strict=True))


def check_positive(violations: Violations, field: str, number: int | None) -> None:
    """Checks a number of documents or tokens in `field`."""
    if number is not None and number < 1:
        violations.add(field, f"is {number}; it must be at least 1")


def best_first(scores: Sequence[float], top_n: int | None) -> list[int]:
    """The positions of the `top_n` highest scores, the highest first; None returns all."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]


def requests_for_texts(
    generator: Generator, texts: Sequence[str | Sequence[int]], call: VectorCall
) -> list[RequestOptions]:
    """The request for each text, or its token ids.

    Raises:
        InvalidArgument: the vectors have fewer numbers than `dimensions`, or the model has no prompt of that name.
    """
    options, files = call.options(ModelKind.VECTORS), generator.model.embedding
    before = ""
    # A model of another kind has no files; its requests are refused when they are admitted.
    if files is not None:
        size, dimensions, name = generator.model.vector_size, call.dimensions, call.prompt_name
        if dimensions is not None and not 1 <= dimensions <= size:
            numbers = f"is {dimensions}; vectors of this model have {size} numbers: use 1 to {size}"
            raise invalid_field("dimensions", numbers)
        if name is not None and name not in files.prompts:
            known = ", ".join(files.prompts) or "none"
            raise invalid_field("prompt_name", f'is "{name:.80}"; the model has the prompts {known}')
        name = name or files.default_prompt
        before = "" if name is None else files.prompts[name]
    return [
        replace(options, prompt=TextPrompt(before + each) if isinstance(each, str) else TokenPrompt(each))
        for each in texts
    ]


async def requests_for_pairs(
    generator: Generator, pairs: Sequence[tuple[str, str]], call: VectorCall
) -> list[RequestOptions]:
    """The request for each pair.

    Raises:
        InvalidArgument: the pairs together have too many characters.
        Unimplemented: the model gives no scores.
    """
    options, made = call.options(ModelKind.SCORES), generator.model.pairs
    generator.check_kind(options)
    assert made is not None, "a model that ranks"
    # A query is tokenized again with each document.
    limit = (await generator.limits()).max_message_bytes
    if (size := sum(len(first) + len(second) for first, second in pairs)) > limit:
        raise InvalidArgument(
            f"the pairs of this call have {size:,} characters, each text counted in each of its pairs; the max is "
            f"{limit:,}: send fewer or shorter texts"
        )
    turns = Turns()
    requests: list[RequestOptions] = []
    for first, second in pairs:
        if call.max_document_tokens is not None:
            second = await made.tokenizer.beginning(second, call.max_document_tokens)
        requests.append(replace(options, prompt=TokenPrompt(await made.encode(first, second))))
        await turns.pause()
    return requests


async def partial_results(live: Sequence[LiveRequest]) -> list[Result | None]:
    """Waits for the results of the requests of a call; None if a vector is not finite.

    Raises:
        QuireError: a request failed in another way; the others are not waited for.
    """

    async def result(each: LiveRequest) -> Result | None:
        try:
            return await each.result()
        except Internal as error:
            if error.reason != "NON_FINITE_LOGITS":
                raise
            return None

    if len(live) == 1:
        return [await result(live[0])]
    tasks = [asyncio.create_task(result(each)) for each in live]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def vector_results(live: Sequence[LiveRequest], field: Callable[[int], str]) -> list[Result]:
    """Waits for the results of the requests of a call. `field` names the text of a request.

    Raises:
        Internal: vectors are not finite (NON_FINITE_VECTOR); the error names their texts, so that a caller can send
            the other ones again.
        QuireError: as `partial_results`.
    """
    found = await partial_results(live)
    results = [each for each in found if each is not None]
    if len(results) == len(found):
        return results
    failed = [field(place) for place, each in enumerate(found) if each is None]
    raise Internal(
        f"the vector of {', '.join(failed[:8])}, or its score, holds NaN or infinity ({len(failed):,} of "
        f"{len(found):,} texts); send the others without them",
        reason="NON_FINITE_VECTOR",
        violations=[FieldViolation(name, "has a vector or a score that is not finite") for name in failed],
    )


async def run_vectors(
    generator: Generator, requests: Sequence[RequestOptions], names: Names, call: VectorCall
) -> Vectors:
    """Runs the requests of one call. If it is cancelled, or one of them fails, the others are aborted.

    Raises:
        QuireError: the error of one request, with the caller's `names` of fields.
    """

    def field(position: int) -> str:
        return names(position)("text" if isinstance(requests[position].prompt, TextPrompt) else "token_ids")

    return await _run(generator, requests, names, call, lambda live: vector_results(live, field))


async def run_partial_vectors(
    generator: Generator, requests: Sequence[RequestOptions], names: Names, call: VectorCall
) -> Vectors:
    """As `run_vectors`, but a text whose vector is not finite fails by itself: its vector is empty."""
    return await _run(generator, requests, names, call, partial_results)


async def _run(
    generator: Generator,
    requests: Sequence[RequestOptions],
    names: Names,
    call: VectorCall,
    results: Callable[[Sequence[LiveRequest]], Awaitable[Sequence[Result | None]]],
) -> Vectors:
    def refusal(position: int, error: QuireError) -> QuireError:
        return renamed(error, names(position))

    with generator.call_memory(AS_MESSAGE) as memory:
        async with running(generator, requests, refusal, memory) as live:
            return Vectors.of(call.model or generator.model.name, await results(live), call.dimensions)


def new_call_id(kind: str) -> str:
    """The id of an answer, which begins with the kind of the call."""
    return f"{kind}-{entropy.random_hex(16)}"


def _vector_of(end: Finished, dimensions: int | None) -> NDArray[np.float32]:
    if not end.vector:
        raise Unavailable("the scheduler was lost while it answered; send the request again", reason="WORKER_LOST")
    vector = np.frombuffer(end.vector, np.float32)
    if dimensions is None or dimensions == len(vector):
        return vector
    vector = vector[:dimensions]
    length = np.float32(np.linalg.norm(vector))
    return (vector / length).astype(np.float32) if length > 0 else vector
