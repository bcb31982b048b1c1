"""A gateway with one fake scheduler, over loopback."""

from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

from gateway.request import served_model
from gateway.text.chat import ChatTemplate
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, running_gateway


@pytest.fixture(scope="session", autouse=True)
def _templates_are_compiled_once() -> Iterator[None]:
    """Otherwise most of a gateway's start."""
    compiled: dict[tuple[str, str], ChatTemplate] = {}

    def compile_once(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        key = source, repr(special_tokens)
        if key not in compiled:
            compiled[key] = ChatTemplate(source, special_tokens)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_model, "ChatTemplate", compile_once)
        yield


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def gateway(scheduler: FakeScheduler) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler) as running:
        yield running
