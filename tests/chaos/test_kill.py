"""kill -9 of each process under load: clients see a pause, but never a lost, repeated or changed token.

With constraints, matchers are rebuilt from the tokens.
"""

import asyncio
from collections.abc import Callable

import httpx
import pytest
import pytest_asyncio

from quire.client import Constraint, GenerationOptions, StructuralTag, StructuralTags, TokenChunk
from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model
from tests.support.killing import MAX_TOKENS, Outputs, Streams, story_options, until_hit
from tests.support.serving import Served

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 200}
CALLS = StructuralTags([StructuralTag("<call>", "</call>", json_schema=PERSON)], required=True, no_free_text=True)
# Longer than any test reads, unless they end early.
CONSTRAINTS = (
    Constraint(json_schema=PEOPLE),
    Constraint(regex="([a-z]{3} [0-9]{2,4}, ){400}"),
    Constraint(json_schema=PEOPLE, begins_after=" "),
    Constraint(structural_tags=CALLS),
)
ENDLESS = dict.fromkeys(ModelDirectory.open(resolve_model(None)).eos_token_ids, -100.0)


def constrained_options(index: int) -> GenerationOptions:
    """Greedy and seeded sampling with each constraint; one row in five has none."""
    constraint = None if index % 5 == 4 else CONSTRAINTS[index % len(CONSTRAINTS)]
    return GenerationOptions(
        temperature=float(index % 2), seed=index, max_tokens=MAX_TOKENS, constraint=constraint, logit_bias=ENDLESS
    )


OPTIONS: dict[str, Callable[[int], GenerationOptions]] = {"stories": story_options, "constrained": constrained_options}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(request: pytest.FixtureRequest, survivor: Served) -> tuple[str, Outputs]:
    """Streams, and their outputs if no process dies."""
    return request.param, await Streams(options_of=OPTIONS[request.param]).read(survivor.client)


@pytest.mark.parametrize(
    ("undisturbed", "victim"),
    [
        ("stories", "worker"),
        ("stories", "scheduler"),
        ("stories", "gateway"),
        pytest.param("constrained", "worker", marks=pytest.mark.extended),
    ],
    indirect=["undisturbed"],
)
async def test_streams_survive_the_loss_of(undisturbed: tuple[str, Outputs], victim: str, served: Served) -> None:
    kind, expected = undisturbed
    constraints = CONSTRAINTS if kind == "constrained" else ()

    async def disturbed() -> Outputs:
        # A new worker compiles constraints first: otherwise streams without one may end before the others begin.
        await asyncio.gather(
            *(served.client.generate("", GenerationOptions(max_tokens=1, constraint=each)) for each in constraints)
        )
        streams = Streams(durable=victim == "gateway", options_of=OPTIONS[kind])
        async with streams.reading(served) as reading:
            await streams.advance()
            await streams.kill(served, victim)
            return await reading

    assert await until_hit(disturbed) == expected


async def test_a_stream_goes_on_when_the_page_kills_the_worker(served: Served) -> None:
    """The effect of the page's button "Kill the worker", with `--demo`."""
    num_asked = 300
    killed = served.server.services["worker"]
    options = GenerationOptions(max_tokens=num_asked, temperature=0.0, ignore_eos=True)
    async with (
        httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=30) as http,
        served.client.generate_stream("Once upon a time", options) as stream,
    ):
        num_tokens = 0
        async for event in stream:
            if not num_tokens:
                (await http.post("/ui/kill", json={"service": "worker"})).raise_for_status()
            num_tokens += len(event.token_ids) if isinstance(event, TokenChunk) else 0
    assert num_tokens == num_asked
    assert served.server.services["worker"] != killed
