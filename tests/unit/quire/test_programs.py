"""Programs with a client that answers from memory: their requests in order, and their ends."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from quire.programs import Program, join
from quire.rpc.errors import Internal, InvalidArgument, PermissionDenied, QuireError, ResourceExhausted, Unavailable


class FakeClient:
    """A token is a character. "b" is more likely than the others."""

    def __init__(self) -> None:
        self.pins: list[str] = []
        self.unpinned: list[str] = []
        self.tokenized: list[str] = []
        self.errors: list[QuireError] = []
        """Errors that the next pins raise."""
        self.error_of_unpin: QuireError | None = None
        self.hangs = False
        self.hanging: asyncio.Queue[None] = asyncio.Queue()
        """One entry for each call that hangs."""
        self.is_pinned_again = asyncio.Event()
        self.num_running = self.max_running = self.num_cancelled = 0

    async def pin_prefix(self, prefix: str, **_: object) -> SimpleNamespace:
        if self.errors:
            raise self.errors.pop()
        self.pins.append(prefix)
        if len(self.pins) > 1:
            self.is_pinned_again.set()
        return SimpleNamespace(pin_id=f"pin of {prefix}")

    async def unpin_prefix(self, pin_id: str, *, timeout_s: float) -> None:
        if self.error_of_unpin is not None:
            raise self.error_of_unpin
        self.unpinned.append(pin_id)

    async def tokenize(self, prompt: str, **_: object) -> SimpleNamespace:
        self.tokenized.append(prompt)
        return SimpleNamespace(token_ids=tuple(map(ord, prompt)))

    async def generate(self, prompt: str | Sequence[int], options: Any, **_: object) -> SimpleNamespace:
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            if self.hangs:
                self.hanging.put_nowait(None)
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        scored = [] if isinstance(prompt, str) else prompt[options.prompt_logprobs_start :]
        positions = [
            SimpleNamespace(chosen=SimpleNamespace(logprob=-1.0 if each == ord("b") else -2.0)) for each in scored
        ]
        usage = SimpleNamespace(prompt_tokens=len(prompt), cached_tokens=0, generated_tokens=1)
        return SimpleNamespace(text="!", usage=usage, prompt_logprobs=positions)


@pytest.fixture
async def client() -> Any:
    return FakeClient()


async def test_a_prefix_that_cannot_be_pinned_is_used_all_the_same(client) -> None:
    for error in (ResourceExhausted("quota"), InvalidArgument("too short"), PermissionDenied("no may_pin")):
        client.errors = [error]
        async with Program(client, "a document") as program:
            assert await program.branch().gen() == "!"
        assert not client.unpinned


async def test_what_a_program_raises_is_not_lost_where_its_pin_cannot_be_ended(client) -> None:
    client.error_of_unpin = Unavailable("away")
    with pytest.raises(KeyError, match="mine"):
        async with Program(client, "a document"):
            raise KeyError("mine")


async def test_a_pin_is_renewed_after_any_error(client, monkeypatch) -> None:
    monkeypatch.setattr("quire.programs._PIN_S", 0.002)
    async with Program(client, "a document"):
        client.errors = [Unavailable("away"), Internal("broken"), ResourceExhausted("full")]
        await client.is_pinned_again.wait()
        assert not client.errors


async def test_a_program_that_is_cancelled_cancels_its_calls_and_ends_its_pin(client) -> None:
    client.hangs = True

    async def run() -> None:
        async with Program(client, "a document") as program:
            await join(branch.gen() for branch in program.branch().fork(8))

    running = asyncio.create_task(run())
    for _ in range(8):
        await client.hanging.get()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert client.num_cancelled == 8
    assert client.unpinned == ["pin of a document"]


async def test_parts_that_cannot_all_be_made_are_cancelled(client) -> None:
    client.hangs = True

    def parts(program: Program) -> Any:
        yield program.branch().gen()
        raise KeyError("mine")

    async with Program(client, "a document") as program:
        with pytest.raises(KeyError, match="mine"):
            await join(parts(program))
    assert client.num_running == 0


async def test_forks_of_forks_go_on_by_themselves(client) -> None:
    first = Program(client, "a").branch()
    (second,) = first.append("b").fork(1)
    await second.gen("answer")
    third, fourth = second.fork(2)
    await third.append("c").gen("answer")
    assert (first.prompt, second.prompt, third.prompt, fourth.prompt) == ("ab", "ab!", "ab!c!", "ab!")
    fourth.values["answer"] = "other"
    assert (second["answer"], third["answer"]) == ("!", "!")
    assert not first.values


async def test_of_many_choices_that_may_begin_alike_a_few_are_scored_at_once_over_one_branch(client) -> None:
    choices = [f"{number:03}" for number in range(300)]
    branch = Program(client, "a document").branch()
    assert await branch.select([*choices, "bbb", "bb"]) == "bbb"
    assert client.max_running <= 64
    assert client.tokenized.count("a document") == 1
    assert branch.prompt == "a documentbbb"
    branch = Program(client, "a document").branch()
    assert await branch.select(["bx", "bxx", "b", "b"], "chosen") == "b"
    assert client.num_running == 0
    assert branch.program.costs.calls == 3
    assert branch["chosen"] == "b"


@pytest.mark.parametrize(
    ("prefix", "choices", "message"),
    [
        ("a document", [], r"choices is \[\]; select needs at least one text"),
        ("a document", "yes", "choices is 'yes'; select needs at least one text, in a list"),
        ("a document", ["yes", ""], r"choices\[1\] is '', which has no tokens"),
        ("", ["yes", "no"], "the first token of a prompt has no log probability"),
    ],
)
async def test_choices_that_cannot_be_scored_are_named(client, prefix, choices, message) -> None:
    branch = Program(client, prefix).branch()
    with pytest.raises(ValueError, match=message):
        await branch.select(choices)
    assert branch.prompt == prefix
