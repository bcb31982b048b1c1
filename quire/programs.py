"""Programs over one cached prefix: branches of a text or conversation that generate, select, fork and join.

    async with AsyncClient() as client, Program(client, document) as program:
        drafts = program.branch().append("\\nSummary:").fork(8)
        await join(draft.gen("summary", max_tokens=60, seed=seed) for seed, draft in enumerate(drafts))

The prefix is pinned while the program runs, and a branch begins with exactly the text of its parent, so the common
prefix of branches is computed once. The terms are SGLang's (Zheng et al., 2024, section 2).
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import fmean
from typing import Any, Self, TypeVar

from quire.client import AsyncClient, ChatMessage, Generation, GenerationOptions, PinnedPrefix
from quire.rpc.errors import InvalidArgument, PermissionDenied, QuireError, ResourceExhausted

_PIN_S = 60.0
_UNPIN_TIMEOUT_S = 5.0
_SCORED_AT_ONCE = 64
"""Choices of one `select`, so that many of them do not fill the queue of the server."""

Result = TypeVar("Result")

Prompt = str | tuple[ChatMessage, ...]
"""A text, or the messages of a conversation."""


@dataclass(slots=True)
class Costs:
    """The cost of a program's calls so far, in tokens; the cached tokens are part of the prompt tokens."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, generation: Generation) -> None:
        self.calls += 1
        self.prompt_tokens += generation.usage.prompt_tokens
        self.cached_tokens += generation.usage.cached_tokens
        self.generated_tokens += generation.usage.generated_tokens


class Program:
    """Branches that begin with one prefix, which stays cached from `async with` to its end.

    Programs of one prefix share a pin. It ends with the first of them, and each of the others renews it every half
    minute; meanwhile the prefix is cached as long as there is room.

    Args:
        client: Makes the calls. Methods raise the client's errors.
        prefix: A text, which branches continue, or the messages of a conversation.
        options: The default options of all calls.
        pin: Protect the prefix from eviction. A prefix that cannot be pinned, because it is shorter than a block or
            exceeds the quota of pins, or because the key may not pin, is cached while there is room.
    """

    def __init__(
        self,
        client: AsyncClient,
        prefix: str | Sequence[ChatMessage] = "",
        options: GenerationOptions | None = None,
        *,
        model: str | None = None,
        pin: bool = True,
    ) -> None:
        self.costs = Costs()
        self._client = client
        self._prefix = prefix if isinstance(prefix, str) else tuple(prefix)
        self._options = options or GenerationOptions()
        self._model = model
        self._pins = pin and bool(prefix)
        self._pin: PinnedPrefix | None = None
        self._renewal: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._pins:
            with contextlib.suppress(InvalidArgument, PermissionDenied, ResourceExhausted):
                await self._renew()
                self._renewal = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        if self._pin is not None:
            # A pin that stays ends by itself, and an error of the program must not be lost.
            with contextlib.suppress(QuireError):
                await self._client.unpin_prefix(self._pin.pin_id, timeout_s=_UNPIN_TIMEOUT_S)

    def branch(self) -> "Branch":
        """A new branch, which begins with the prefix."""
        return Branch(self, self._prefix)

    async def ask(self, prompt: Prompt, options: GenerationOptions) -> Generation:
        """One generation, counted in `costs`."""
        if isinstance(prompt, tuple):
            generation = await self._client.chat(prompt, options, model=self._model)
        else:
            generation = await self._client.generate(prompt, options, model=self._model)
        self.costs.add(generation)
        return generation

    async def logprobs(self, token_ids: Sequence[int], start: int) -> list[float]:
        """The log probability of each token from the position `start` on, given the tokens before it."""
        options = GenerationOptions(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        generation = await self._client.generate(token_ids, options, model=self._model)
        self.costs.add(generation)
        return [position.chosen.logprob for position in generation.prompt_logprobs]

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        tokenization = await self._client.tokenize(prompt, add_special_tokens=add_special_tokens, model=self._model)
        return tokenization.token_ids

    def options(self, changes: dict[str, Any]) -> GenerationOptions:
        """The program's options with these fields changed."""
        return replace(self._options, **changes)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_PIN_S / 2)
            with contextlib.suppress(QuireError):
                await self._renew()

    async def _renew(self) -> None:
        self._pin = await self._client.pin_prefix(self._prefix, time_to_live_ms=round(_PIN_S * 1000), model=self._model)


@dataclass(slots=True)
class Branch:
    """A text or conversation that grows by appended and generated text.

    Attributes:
        values: The texts that were generated or selected under a name.
    """

    program: Program = field(repr=False)
    prompt: Prompt
    values: dict[str, str] = field(default_factory=dict[str, str])

    def __getitem__(self, name: str) -> str:
        return self.values[name]

    def append(self, text: str, role: str = "user") -> Self:
        """Adds a text; to a conversation, as a message of this role."""
        if isinstance(self.prompt, str):
            self.prompt += text
        else:
            self.prompt += (ChatMessage(role, text),)
        return self

    async def gen(self, name: str | None = None, **changes: Any) -> str:
        """Generates text, appends it, and returns it.

        Args:
            name: The name under which `values` keeps it.
            changes: Fields of GenerationOptions, for example max_tokens, stop or constraint. TypeError for others.
        """
        generation = await self.program.ask(self.prompt, self.program.options(changes))
        return self._take(generation.text, name)

    async def samples(self, n: int, name: str | None = None, **changes: Any) -> "list[Branch]":
        """Branches that continue this one with n samples of one request, which computes the prompt once."""
        generation = await self.program.ask(self.prompt, self.program.options(changes | {"n": n}))
        branches = self.fork(n)
        for branch, sequence in zip(branches, generation.sequences, strict=True):
            branch._take(sequence.text, name)
        return branches

    async def select(self, choices: Sequence[str], name: str | None = None) -> str:
        """Appends the most likely of the choices and returns it: the one whose tokens have the highest mean log
        probability after the branch, by the log probabilities of a prompt that ends with it. The first of equals.

        Raises:
            ValueError: there are no choices, one has no tokens, or the branch has no text yet.
        """
        if isinstance(choices, str) or not choices:
            raise ValueError(f"choices is {choices!r}; select needs at least one text, in a list")
        before = await self.program.tokenize(self.prompt)
        turns = asyncio.Semaphore(_SCORED_AT_ONCE)

        async def score(position: int, choice: str) -> float:
            async with turns:
                return await self._score(before, position, choice)

        positions = {choice: choices.index(choice) for choice in choices}
        scores = await join(score(position, choice) for choice, position in positions.items())
        best = max(zip(scores, positions, strict=True), key=lambda pair: pair[0])
        return self._take(best[1], name)

    def fork(self, n: int) -> "list[Branch]":
        """n branches that begin with the whole text of this one."""
        return [Branch(self.program, self.prompt, dict(self.values)) for _ in range(n)]

    def _take(self, text: str, name: str | None) -> str:
        self.append(text, "assistant")
        if name is not None:
            self.values[name] = text
        return text

    async def _score(self, before: tuple[int, ...], position: int, choice: str) -> float:
        """The mean log probability of the tokens of the choice. `before` are the tokens of the branch."""
        if isinstance(self.prompt, str):
            # A tokenizer may join the end of the text with the beginning of the choice.
            whole = await self.program.tokenize(self.prompt + choice)
            same = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
            start = sum(1 for _ in same)
        else:
            whole = before + await self.program.tokenize(choice, add_special_tokens=False)
            start = len(before)
        if start == len(whole):
            raise ValueError(f"choices[{position}] is {choice!r}, which has no tokens; leave it out")
        if not start:
            raise ValueError("the first token of a prompt has no log probability; append a text before select")
        return fmean(await self.program.logprobs(whole, start))


async def join(parts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs coroutines side by side and returns their results in order. Where one fails, the others are cancelled and
    its error is raised."""
    tasks: list[asyncio.Future[Result]] = []
    try:
        tasks += map(asyncio.ensure_future, parts)
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
