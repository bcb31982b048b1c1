"""Replicas of a DNS name: new ones are linked, and lost ones are left when their requests are over."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import cast

import pytest

from gateway.replicas.members import LinkMaker, Members, Resolver, may_be_several, resolve_name
from quire.rpc.address import DnsName
from tests.support.processes import until_true

NAME = "dns:///replicas.test:50052"
A, B, C = "10.0.0.1:50052", "10.0.0.2:50052", "10.0.0.3:50052"


class Link:
    """Stands in for a stream, which the test opens and breaks."""

    def __init__(self, address: str, *, host_name: str | None = None) -> None:
        self.address, self.host_name = address, host_name
        self.is_connected = True
        self.problem: str | None = None
        self.is_running = False

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False


class Rig:
    """Members of one name; the test gives its addresses."""

    def __init__(self, *targets: str, interval_s: float = 0.001) -> None:
        self.answer: set[str] | OSError = {A}
        # Addresses that come before it.
        self.answers: list[set[str]] = []
        self.num_asked = 0
        self.busy: set[str] = set()
        self.found: list[str] = []
        self.gone: list[str] = []
        self.made: dict[str, Link] = {}
        self.members = Members(targets or (NAME,), cast(LinkMaker, self.open), self, Resolver(self.resolve, interval_s))

    def open(self, address: str, *, host_name: str | None = None) -> Link:
        self.made[address] = Link(address, host_name=host_name)
        return self.made[address]

    async def resolve(self, name: DnsName) -> set[str]:
        assert str(name) == NAME
        self.num_asked += 1
        answer = self.answers.pop(0) if self.answers else self.answer
        if isinstance(answer, OSError):
            raise answer
        return answer

    def is_idle(self, address: str) -> bool:
        return address not in self.busy

    def on_found(self, address: str) -> None:
        self.found.append(address)

    def on_gone(self, address: str) -> None:
        self.gone.append(address)

    async def until(self, *addresses: str) -> None:
        await until_true(lambda: set(self.members.links) == set(addresses))

    async def more_answers(self, count: int = 5) -> None:
        before = self.num_asked
        await until_true(lambda: self.num_asked >= before + count)


@contextlib.asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[Rig]:
    task = asyncio.create_task(rig.members.run())
    try:
        yield rig
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert not any(link.is_running for link in rig.made.values())


async def test_an_address_that_the_name_loses_stays_until_its_requests_are_over():
    async with running(Rig()) as rig:
        rig.busy = {A}
        await rig.until(A)
        rig.answer = {B}
        await rig.until(A, B)
        await rig.more_answers()
        assert not rig.members.is_listed(A)
        assert rig.members.is_listed(B)
        assert A in rig.members.links
        rig.busy = set()
        await rig.until(B)
        await until_true(lambda: not rig.made[A].is_running)
    assert rig.gone == [A]


async def test_one_incomplete_answer_closes_no_stream():
    rig = Rig()
    rig.answer, rig.answers = {A, B}, [{A, B}, {B}]
    async with running(rig):
        await rig.until(A, B)
        await rig.more_answers()
        assert set(rig.members.links) == {A, B}
    assert rig.gone == []


async def test_an_address_that_the_name_lost_is_left_when_its_stream_breaks():
    async with running(Rig(interval_s=0.01)) as rig:
        rig.busy = {A}
        await rig.until(A)
        rig.answer = {B}
        await rig.until(A, B)
        rig.made[A].is_connected = False
        rig.members.on_disconnected(A)
        assert rig.gone == [A]
        await until_true(lambda: not rig.made[A].is_running)


async def test_a_stream_that_breaks_has_its_name_resolved_at_once():
    async with running(Rig(interval_s=3600)) as rig:
        await rig.until(A)
        # Another machine replaced it.
        rig.answer = {B}
        rig.made[A].is_connected = False
        rig.members.on_disconnected(A)
        await rig.until(B)
    assert rig.num_asked == 2


@pytest.mark.parametrize("answer", [OSError(-2, "Name or service not known"), set()])
async def test_a_name_that_is_not_resolved_keeps_its_replicas_and_says_so(answer):
    async with running(Rig()) as rig:
        await rig.until(A)
        assert rig.members.problems == []
        rig.answer = answer
        await rig.more_answers()
        assert set(rig.members.links) == {A}
        assert rig.members.is_listed(A)
        (problem,) = rig.members.problems
        assert problem.startswith(f"{NAME}: ")
        rig.answer = {A, C}
        await rig.until(A, C)
        assert rig.members.problems == []


async def test_addresses_of_the_command_line_stay():
    async with running(Rig(B, NAME)) as rig:
        rig.answer = {A, B}
        await rig.until(A, B)
        rig.answer = {C}
        await rig.until(B, C)
        rig.made[B].is_connected = False
        rig.members.on_disconnected(B)
        await rig.more_answers()
        assert set(rig.members.links) == {B, C}
        assert rig.members.is_listed(B)


async def test_a_name_has_addresses_of_one_kind():
    (address,) = await resolve_name(DnsName("localhost", 50052))
    assert address in ("127.0.0.1:50052", "[::1]:50052")
    with pytest.raises(OSError, match=r"not known|failure"):
        await resolve_name(DnsName("no-such-host.invalid", 1))


def test_one_name_may_be_several_replicas():
    assert may_be_several([NAME])
    assert may_be_several([A, B])
    assert not may_be_several([A])
