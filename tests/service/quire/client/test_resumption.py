"""Durable streams of both clients go on after their gateway is lost, through another one."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quire.client import (
    AsyncClient,
    Client,
    GenerationOptions,
    RequestCompleted,
    SequenceFinished,
    TokenChunk,
)
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import ResourceExhausted, Unavailable
from tests.support.cut_link import CutLink, cut_link
from tests.support.fake_gateway import start_fake_gateway
from tests.support.fake_scheduler import FakeScheduler
from tests.support.flaky_gateway import EitherClient, FlakyGeneration
from tests.support.gateway_process import running_gateway
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.two_gateways import TwoGateways, two_gateways

Kind = type[Client] | type[AsyncClient]
OPTIONS = GenerationOptions(seed=5, temperature=1.0, max_tokens=150, ignore_eos=True)
TWO_SEQUENCES = GenerationOptions(seed=5, temperature=1.0, max_tokens=80, ignore_eos=True, n=2)

both_clients = pytest.mark.parametrize("kind", [Client, AsyncClient])


@dataclass(frozen=True)
class Linked:
    """Two gateways, each behind a link that can be cut."""

    gateways: TwoGateways
    links: tuple[CutLink, CutLink]

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self.links]

    def cut_busy_one(self) -> None:
        """The link of the gateway that has live requests."""
        (busy,) = (i for i, gateway in enumerate(self.gateways.both) if len(gateway.gateway._ledger))
        self.links[busy].cut()

    def break_streams(self) -> None:
        """Ends them at the gateway that has them, which stays."""
        for gateway in self.gateways.both:
            for live in gateway.gateway._ledger:
                live.fail(Unavailable("the connection broke"))


@pytest.fixture
async def linked(tmp_path: Path) -> AsyncIterator[Linked]:
    async with two_gateways(tmp_path) as gateways, contextlib.AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(cut_link(running.gateway.grpc_address)) for running in gateways.both
        ]
        yield Linked(gateways, (first, second))
        await wait_nothing_in_use(gateways.scheduler)


@contextlib.asynccontextmanager
async def client_of(kind: Kind, addresses: list[str]) -> AsyncIterator[EitherClient]:
    client = EitherClient(kind(addresses))
    try:
        yield client
    finally:
        await client.close()


@dataclass
class Sequence:
    """What came of one."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""


async def read_disturbed(
    client: EitherClient, options: GenerationOptions, disturb: Callable[[], None], *, times: int = 1
) -> dict[int, Sequence]:
    """What a durable stream brought whose fifth chunk was followed by `disturb`, and so were others after that; nothing
    is missing or twice."""
    sequences: dict[int, Sequence] = {}
    stream, num_chunks = client.client.generate_stream("hello", options, durable=True, timeout_s=30), 0
    while stream.completed is None:
        event = await client.next(stream)
        if isinstance(event, TokenChunk):
            sequence = sequences.setdefault(event.sequence_index, Sequence())
            assert event.offset == len(sequence.token_ids)
            sequence.token_ids += event.token_ids
            sequence.text += event.text
            num_chunks += 1
            if num_chunks in range(5, 5 + 10 * times, 10):
                disturb()
    await client.close_stream(stream)
    assert num_chunks > 5
    return sequences


async def whole_answer(client: EitherClient, options: GenerationOptions) -> dict[int, Sequence]:
    answer = await client.call("generate", "hello", options)
    return {each.index: Sequence(list(each.token_ids), each.text) for each in answer.sequences}


@pytest.mark.parametrize(("kind", "options"), [(Client, TWO_SEQUENCES), (AsyncClient, OPTIONS)])
async def test_a_stream_goes_on_through_the_other_gateway(
    kind: Kind, linked: Linked, options: GenerationOptions
) -> None:
    async with client_of(kind, linked.addresses) as client:
        whole = await whole_answer(client, options)
        assert await read_disturbed(client, options, linked.cut_busy_one) == whole


@both_clients
async def test_a_stream_that_breaks_goes_on_through_the_same_gateway(kind: Kind, linked: Linked) -> None:
    async with client_of(kind, linked.addresses[:1]) as client:
        whole = await whole_answer(client, OPTIONS)
        assert await read_disturbed(client, OPTIONS, linked.break_streams) == whole


@both_clients
async def test_a_stream_goes_on_from_what_came_where_no_scheduler_knows_it(kind: Kind) -> None:
    """The fake scheduler keeps nothing of what it does, as one that has just started."""
    scheduler, times = FakeScheduler(), 2
    await scheduler.start()
    options = GenerationOptions(max_tokens=60, temperature=1.0, stop=["no such text"], logprobs=0)
    async with running_gateway(scheduler) as gateway, client_of(kind, [gateway.gateway.grpc_address]) as client:
        whole = await whole_answer(client, options)
        scheduler.step_delay_s = 0.005

        def lose() -> None:
            for live in gateway.gateway._ledger:
                live.fail(Unavailable("the connection broke"))

        assert await read_disturbed(client, options, lose, times=times) == whole
    first, *others = scheduler.submits[1:]
    assert len(others) == times
    assert {submit.sampling.seed for submit in others} == {first.sampling.seed}
    assert [submit.request_id for submit in others] == [first.request_id] * times
    assert all(submit.emitted and submit.durable for submit in others)
    await scheduler.stop()


class RefusedResumption(FlakyGeneration):
    """The stream of "halfway" breaks after its only chunk; the given errors refuse to resume it."""

    async def ResumeStream(
        self, request: generation_pb2.ResumeStreamRequest, context: object
    ) -> AsyncIterator[generation_pb2.ResumeStreamResponse]:
        self._fail()
        assert [offset.offset for offset in request.offsets] == [1]
        async for event in self._events("halfway"):
            if "chunk" not in event:
                yield generation_pb2.ResumeStreamResponse(**event)


@both_clients
async def test_a_lost_stream_whose_key_has_no_request_left_goes_on_when_it_has(kind: Kind) -> None:
    refused = ResourceExhausted("come back in 0.2 s", reason="RATE_LIMIT_EXCEEDED", retry_after_ms=200)
    generation = RefusedResumption(Unavailable("the connection broke"), refused, refused)
    server = await start_fake_gateway("127.0.0.1:0", generation)
    async with client_of(kind, [server.address]) as client:
        events = await client.events("halfway", durable=True, timeout_s=60)
    await server.stop(0)
    assert [type(event) for event in events] == [TokenChunk, SequenceFinished, RequestCompleted]
    assert generation.num_calls == 1 + 3
