"""Gateways of tiny models of vectors and of scores, whose scheduler makes them of token ids."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.embedding_models import make_embedding_model, make_ranking_model
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, running_gateway

SIZE = 48
Rig = tuple[FakeScheduler, RunningGateway]


@asynccontextmanager
async def vector_gateway(folder: Path) -> AsyncIterator[Rig]:
    """Serves "tiny" from `folder`: texts of at most 32 tokens, and the prompt `query`."""
    settings = {"prompts": {"query": "a cat "}, "default_prompt_name": None}
    model = make_embedding_model(folder / "tiny", settings=settings)
    fake = FakeScheduler(vector=_vector_of, architecture="BertModel", vocab_size=78, max_model_len=33)
    async with fake as scheduler, running_gateway(scheduler, model=str(model)) as gateway:
        yield scheduler, gateway


@asynccontextmanager
async def ranking_gateway(folder: Path) -> AsyncIterator[Rig]:
    """Serves "ranker" from `folder`: pairs of at most 62 tokens, and bodies of at most 64 KiB."""
    model = make_ranking_model(folder / "ranker")
    architecture = "BertForSequenceClassification"
    fake = FakeScheduler(vector=_score_of, architecture=architecture, vocab_size=78, max_model_len=63)
    async with fake as scheduler, running_gateway(scheduler, model=str(model), max_message_bytes=65536) as gateway:
        yield scheduler, gateway


def _vector_of(prompt: tuple[int, ...]) -> list[float]:
    """Different for different prompts."""
    return [float(sum(prompt) + len(prompt) * place) for place in range(1, SIZE + 1)]


def _score_of(prompt: tuple[int, ...]) -> list[float]:
    return [sum(prompt) / 1000]
