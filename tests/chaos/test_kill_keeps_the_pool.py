"""kill -9 of a worker whose pool the supervisor holds: streams continue from all blocks that were sealed there."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quire.client import GenerationOptions
from scheduler_svc.core.states import OUTPUT_INTERVAL
from tests.support.killing import Outputs, Streams, until_hit
from tests.support.models import make_model
from tests.support.serving import Served, serving

NUM_STREAMS, MAX_TOKENS = 4, 240
# One token a step, so that the trace says how many tokens were computed, and no stream runs to its end by drafts from
# the answers of the run before.
SETTINGS: dict[str, Any] = {
    "num_gpu_blocks": 512,
    "dtype": "bfloat16",
    "multi_step_ms": 0,
    "speculate": ("off",),
    "persistent_kv_cache": "on",
    "num_threads": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "two ranks": {"tensor_parallel_size": 2},
    "int8 pool": {"kv_cache_dtype": "int8"},
    "several tokens a step": {"speculate": ("ngram",), "multi_step_ms": 24},
    # Its layers keep states, so streams continue from the last checkpoint of their output. The pool holds all of both
    # runs: in a full one checkpoints give way.
    "states": {"model": "qwen3.5", "num_gpu_blocks": 1024},
    "states of two ranks": {"model": "qwen3.5", "tensor_parallel_size": 2, "num_gpu_blocks": 1024},
    # The model itself.
    "draft model": {"speculate": ("draft",), "draft_model": "quire-tiny", "multi_step_ms": 24},
}


def options(index: int) -> GenerationOptions:
    return GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=MAX_TOKENS, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Traced:
    """A server that writes its steps to a trace."""

    served: Served
    trace: Path
    counts_tokens: bool
    """Whether each row computes as many tokens as its steps say."""
    max_lost: int = 32
    """Tokens of each stream that are computed again at most."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def survivor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    trace = tmp_path_factory.mktemp("trace") / "steps.json"
    settings = SETTINGS | KINDS[request.param]
    max_lost = 32
    if "model" in settings:
        directory = tmp_path_factory.mktemp("model")
        make_model(directory, settings["model"])
        settings["model"], max_lost = str(directory), OUTPUT_INTERVAL + 32
    async with serving(**settings, trace_steps=str(trace)) as running:
        yield Traced(running, trace, settings["multi_step_ms"] == 0, max_lost)


def num_computed_since_attach(trace: Path) -> int:
    """The number of tokens that were computed since the last attachment of workers."""
    events = [json.loads(line.rstrip(",")) for line in trace.read_text().splitlines() if line.endswith(",")]
    attached = max(place for place, event in enumerate(events) if event["name"] == "replica")
    return sum(event["args"]["num_tokens"] for event in events[attached:] if event["name"] == "plan")


@pytest.mark.parametrize(
    ("survivor", "victim"),
    [
        ("one rank", "worker"),
        pytest.param("two ranks", "worker-1", marks=pytest.mark.long),
        pytest.param("int8 pool", "worker", marks=pytest.mark.long),
        pytest.param("several tokens a step", "worker", marks=pytest.mark.long),
        pytest.param("states", "worker", marks=pytest.mark.long),
        pytest.param("states of two ranks", "worker-1", marks=pytest.mark.long),
        pytest.param("draft model", "worker", marks=pytest.mark.long),
    ],
    indirect=["survivor"],
)
async def test_text_is_that_of_an_undisturbed_run_and_little_is_computed_again(survivor: Traced, victim: str) -> None:
    served = survivor.served
    undisturbed = await Streams(NUM_STREAMS, options_of=options).read(served.client)

    async def disturbed() -> tuple[Outputs, int]:
        streams = Streams(NUM_STREAMS, options_of=options)
        async with streams.reading(served) as reading:
            await streams.advance(100)
            before = sum(len(each.token_ids) for each in streams)
            await streams.kill(served, victim)
            return await reading, before

    outputs, num_before = await until_hit(disturbed)
    assert outputs == undisturbed
    if survivor.counts_tokens:
        num_to_come = NUM_STREAMS * MAX_TOKENS - num_before
        # Fewer than two of more than six blocks a stream: the last one is not full, and steps in flight seal nothing.
        assert num_computed_since_attach(survivor.trace) < num_to_come + NUM_STREAMS * survivor.max_lost
