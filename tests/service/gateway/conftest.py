"""A gateway with one fake scheduler, over loopback."""

from collections.abc import AsyncIterator, Iterator, Mapping

import pytest
import pytest_asyncio

from gateway.request import served_model
from gateway.text.chat import ChatTemplate
from tests.support.chat_models import write_chat_model
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.rig import Rig, running_rig


@pytest.fixture(scope="session", autouse=True)
def _templates_are_compiled_once() -> Iterator[None]:
    """Compiling templates would be most of a gateway's start."""
    compiled: dict[tuple[str, str], ChatTemplate] = {}

    def compile_once(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        key = source, repr(special_tokens)
        if key not in compiled:
            compiled[key] = ChatTemplate(source, special_tokens)
        return compiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_model, "model_template", compile_once)
        yield


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler() as fake:
        yield fake


@pytest.fixture
async def other() -> AsyncIterator[FakeScheduler]:
    """Another scheduler, for gateways that have two."""
    async with FakeScheduler() as fake:
        yield fake


@pytest.fixture
async def gateway(scheduler: FakeScheduler) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler) as running:
        yield running


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model whose chats support tools and reasoning."""
    return str(write_chat_model(tmp_path_factory.mktemp("model") / "model"))


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def shared_rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running_rig(tmp_path_factory.mktemp("rig")) as running:
        yield running


@pytest.fixture
def rig(shared_rig: Rig) -> Rig:
    """For tests that only leave changes that `reset` undoes."""
    shared_rig.reset()
    return shared_rig
