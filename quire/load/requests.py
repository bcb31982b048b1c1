"""One request of a load, and operations on a list of them: arrival times, and how to decode."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from quire.load.arrivals import Arrivals

TokenIds = np.ndarray
"""int32[n], read-only."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation that is sent as text."""

    role: str
    content: str


Prompt = TokenIds | str | tuple[Message, ...]

FIRST_TOKEN_ID = 10
"""Drawn prompts have no id below: there special tokens lie in most vocabularies."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadRequest:
    """One request of a load, for any server.

    A conversation is a run of requests with one `group` whose turns count from 0. A turn is sent when the one before
    it has ended; its prompt carries the history, in which drawn tokens stand for the answers (see `carrying`).

    Attributes:
        index: Position in the load; unique.
        prompt: Token ids, or from a file of one's own a text or messages.
        output_len: Tokens to generate in each sequence; None leaves the end to the model.
        n: Sequences to return: parallel samples, or the best of the beams.
        beam_width: Beams, for beam search; None samples.
        group: The conversation, or the shared prefix; None for a request by itself.
        turn: Turns of the conversation before this one.
        num_new_tokens: For a turn: tokens at the end of the prompt that are the user's message.
        arrival_s: When it is sent; None for one without a time of its own, such as a turn that follows another.
        delay_s: For a turn that follows another: seconds from the other's end until it is sent.
    """

    index: int
    prompt: Prompt
    output_len: int | None
    n: int = 1
    beam_width: int | None = None
    group: int | None = None
    turn: int = 0
    num_new_tokens: int | None = None
    arrival_s: float | None = None
    delay_s: float = 0.0

    @property
    def token_ids(self) -> TokenIds:
        """ValueError where the prompt is text."""
        if isinstance(self.prompt, np.ndarray):
            return self.prompt
        raise ValueError(f"request {self.index + 1} has a text as its prompt; token ids are needed here")

    def carrying(self, prompt: TokenIds, answer: Sequence[int]) -> Self:
        """This turn with the real history: the served prompt of the turn before, and the answer to it.

        The history is cut at its beginning if it would make the prompt longer than planned.
        """
        if self.num_new_tokens is None:
            raise ValueError(f"request {self.index} carries no history")
        planned = self.token_ids
        new = planned[len(planned) - self.num_new_tokens :]
        whole = np.concatenate((prompt, np.asarray(answer, np.int32), new))
        return replace(self, prompt=frozen(whole[max(0, len(whole) - len(planned)) :]))


def frozen(token_ids: np.ndarray) -> TokenIds:
    """The same array as int32, read-only."""
    ids = np.ascontiguousarray(token_ids, dtype=np.int32)
    ids.flags.writeable = False
    return ids


def with_arrivals(requests: Iterable[LoadRequest], arrivals: Arrivals, seed: int) -> list[LoadRequest]:
    """The requests with times of arrival. Turns that follow others have no times: they wait for the others.

    Where every turn shall arrive by itself, use `arriving_at(requests, arrivals.times(len(requests), seed))`.
    """
    load = list(requests)
    first = [request for request in load if request.turn == 0]
    times = iter(arrivals.times(len(first), seed).tolist())
    return [replace(request, arrival_s=next(times) if request.turn == 0 else None) for request in load]


def arriving_at(requests: Sequence[LoadRequest], times: Sequence[float] | np.ndarray) -> list[LoadRequest]:
    """Each request with its own time, each a turn 0 of no conversation. ValueError where the numbers differ."""
    if len(requests) != len(times):
        raise ValueError(f"{len(requests)} requests and {len(times)} times of arrival")
    return [
        replace(request, arrival_s=float(time), turn=0, num_new_tokens=None)
        for request, time in zip(requests, times, strict=True)
    ]


def with_decoding(requests: Iterable[LoadRequest], *, n: int = 1, beam_width: int | None = None) -> list[LoadRequest]:
    """The requests with n parallel samples, or with a beam search that returns its n best beams.

    ValueError where n or the width is below 1, n is above the width, or a conversation has several answers.
    """
    for name, value in (("n", n), ("beam width", beam_width)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    if beam_width is not None and n > beam_width:
        raise ValueError(f"n is {n}, must be at most the beam width, {beam_width}")
    load = list(requests)
    if n > 1 and any(request.turn for request in load):
        raise ValueError(f"n is {n}, must be 1 for conversations: the next turn carries one answer")
    return [replace(request, n=n, beam_width=beam_width) for request in load]


def with_other_tokens(requests: Iterable[LoadRequest], shift: int, vocab_size: int) -> list[LoadRequest]:
    """The requests with each drawn token id moved on by `shift`, in a circle: as long as before and with as much in
    common, but nothing of them is cached where the others were served. Texts stay as they are."""
    size = vocab_size - FIRST_TOKEN_ID

    def moved(request: LoadRequest) -> LoadRequest:
        if not isinstance(request.prompt, np.ndarray):
            return request
        return replace(request, prompt=frozen(FIRST_TOKEN_ID + (request.prompt - FIRST_TOKEN_ID + shift) % size))

    return [moved(request) for request in requests] if shift else list(requests)


def describe(requests: Sequence[LoadRequest]) -> dict[str, float]:
    """Means, in tokens, of prompts and outputs, and their coefficients of variation (deviation / mean).

    Leaves out numbers that are unknown in tokens.
    """
    prompts = [len(request.prompt) for request in requests if isinstance(request.prompt, np.ndarray)]
    outputs = [request.output_len for request in requests if request.output_len is not None]
    facts: dict[str, float] = {"requests": len(requests)}
    for name, lengths in (("prompt", prompts), ("output", outputs)):
        if lengths:
            mean = float(np.mean(lengths))
            facts[f"{name}_mean"] = mean
            facts[f"{name}_variation"] = float(np.std(lengths)) / mean
    return facts


def conversations(load: Iterable[LoadRequest]) -> Iterator[list[LoadRequest]]:
    """Runs of consecutive turns; a request by itself is a conversation of one turn."""
    turns: list[LoadRequest] = []
    for request in load:
        if turns and request.turn == 0:
            yield turns
            turns = []
        turns.append(request)
    if turns:
        yield turns
