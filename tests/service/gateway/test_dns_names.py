"""A gateway whose schedulers have one DNS name: it finds those that appear, and leaves those that go."""

import asyncio

import httpx

from gateway.replicas.members import Resolver
from quire.rpc.address import DnsName
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, collect, running_gateway, stream_request
from tests.support.processes import until_true

NAME = "dns:///replicas.test:50052"


class Dns:
    """Answers with the addresses of these schedulers."""

    def __init__(self, *schedulers: FakeScheduler) -> None:
        self.schedulers = list(schedulers)

    async def __call__(self, name: DnsName) -> list[str]:
        assert str(name) == NAME
        return [scheduler.address for scheduler in self.schedulers]


async def send(gateway: RunningGateway, count: int) -> None:
    requests = [stream_request(f"request {number}", max_tokens=2) for number in range(count)]
    await asyncio.gather(*(collect(gateway.generation.GenerateStream(each)) for each in requests))


async def test_a_replica_that_appears_gets_requests_and_one_that_goes_gets_none(scheduler, other):
    dns = Dns(scheduler)
    async with running_gateway(
        scheduler, resolver=Resolver(dns, 0.01), schedulers=(NAME,), routing="round-robin"
    ) as gateway:
        assert scheduler.wants_cache_updates is False
        await send(gateway, 4)
        dns.schedulers.append(other)
        await other.until_known()
        await send(gateway, 4)
        assert (len(scheduler.submits), len(other.submits)) == (6, 2)
        dns.schedulers.remove(scheduler)
        links = gateway.gateway._generator.replicas.links
        await until_true(lambda: scheduler.address not in links)
        await send(gateway, 4)
        assert (len(scheduler.submits), len(other.submits)) == (6, 6)
        # Its counters stay, in its place, which the next one takes.
        async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http:
            assert "quire_gateway_generated_tokens_total 24.0" in (await http.get("/metrics")).text


async def test_readiness_names_a_name_that_cannot_be_resolved():
    async def resolve(name: DnsName) -> list[str]:
        raise OSError(-2, "Name or service not known")

    async with (
        running_gateway(resolver=Resolver(resolve, 0.01), schedulers=(NAME,)) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http,
    ):
        replicas = gateway.gateway._generator.replicas
        await until_true(lambda: replicas.problems)
        answer = await http.get("/ready")
        assert answer.status_code == 503
        assert answer.json()["reason"] == f"no scheduler is connected; {NAME}: Name or service not known"
