"""Programs over one cached prefix: branches of a text or conversation that generate, select, fork and join.

    async with AsyncClient() as client, Program(client, document) as program:
        drafts = program.branch().append("\\nSummary:").fork(8)
        await join(draft.gen("summary", max_tokens=60, seed=seed) for seed, draft in enumerate(drafts))

The prefix is pinned while the program runs, and a branch begins with exactly the text of its parent, so the common
prefix of branches is computed once. The terms are those of SGLang (Zheng et al., 2024, section 2).
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from statistics import fmean
from typing import Any, Self, TypeVar

from quire.client import AsyncClient, ChatMessage, Generation, GenerationOptions, PinnedPrefix
from quire.rpc.errors import InvalidArgument, NotFound, Unavailable

_PIN_S = 60.0

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
        """Counts one call."""
        self.calls += 1
        self.prompt_tokens += generation.usage.prompt_tokens
        self.cached_tokens += generation.usage.cached_tokens
        self.generated_tokens += generation.usage.generated_tokens


class Program:
    """Branches that begin with one prefix, which stays cached from `async with` to its end.

    Args:
        client: Makes the calls. Methods raise the client's errors.
        prefix: A text, which branches continue, or the messages of a conversation.
        options: The default options of all calls.
        pin: Protect the prefix from eviction. A prefix that cannot be pinned, because it is shorter than a block or
            exceeds the quota of pins, is cached while there is room.
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
            with contextlib.suppress(InvalidArgument):
                await self._renew()
                self._renewal = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)
        if self._pin is not None:
            # If its scheduler is not reachable, the pin expires by itself.
            with contextlib.suppress(NotFound, Unavailable):
                await self._client.unpin_prefix(self._pin.pin_id)

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
        """The log probability of each token from the position `start` on, after those before it."""
        options = GenerationOptions(temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        generation = await self._client.generate(token_ids, options, model=self._model)
        self.costs.add(generation)
        return [position.chosen.logprob for position in generation.prompt_logprobs]

    async def tokenize(self, prompt: Prompt, *, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """The token ids of a prompt."""
        tokenization = await self._client.tokenize(prompt, add_special_tokens=add_special_tokens, model=self._model)
        return tokenization.token_ids

    def options(self, changes: dict[str, Any]) -> GenerationOptions:
        """The program's options with these fields changed."""
        return replace(self._options, **changes)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(_PIN_S / 2)
            with contextlib.suppress(InvalidArgument, Unavailable):
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
        """Appends the most likely choice and returns it: the one whose tokens have the highest mean log probability as
        a continuation of the branch. Raises ValueError if there are no choices."""
        if not choices:
            raise ValueError("choices is empty; select needs at least one")
        scores = await join(self._score(choice) for choice in choices)
        best = max(range(len(choices)), key=scores.__getitem__)
        return self._take(choices[best], name)

    def fork(self, n: int) -> "list[Branch]":
        """n branches that begin with the whole text of this one."""
        return [Branch(self.program, self.prompt, dict(self.values)) for _ in range(n)]

    def _take(self, text: str, name: str | None) -> str:
        self.append(text, "assistant")
        if name is not None:
            self.values[name] = text
        return text

    async def _score(self, choice: str) -> float:
        """The mean log probability of the tokens of the choice."""
        before = await self.program.tokenize(self.prompt)
        if isinstance(self.prompt, str):
            # A tokenizer may join the end of the text with the beginning of the choice.
            whole = await self.program.tokenize(self.prompt + choice)
            same = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
            num_shared = sum(1 for _ in same)
        else:
            whole = before + await self.program.tokenize(choice, add_special_tokens=False)
            num_shared = len(before)
        if num_shared == len(whole):
            raise ValueError(f"the choice {choice!r} has no tokens")
        # The first token of a prompt has no log probability.
        start = max(num_shared, 1)
        return fmean(await self.program.logprobs(whole, start)) if start < len(whole) else 0.0


async def join(parts: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs coroutines concurrently and returns their results in order. If one fails, the others are cancelled and its
    error is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
