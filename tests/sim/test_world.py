"""The simulation itself: time, processes, threads and the network."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.rpc.channel import open_channel
from quire.rpc.server import RpcServer
from quire.runtime import clock, entropy
from quire.runtime.logs import configure_logging
from tests.sim.world.network import Network, Pipe
from tests.sim.world.transport import SimTransport
from tests.sim.world.world import Node, StuckError, World, new_world

_CALL = "/test.Probe/Call"


def run(world: World, node: Node, main: Callable[[], Awaitable[Any]], limit_s: float = 60) -> Any:
    async def start() -> Any:
        return await main()

    task = node.start(start)
    world.run(task.done, limit_s)
    return task.result()


def test_a_world_leaves_the_log_of_the_tests_as_it_was() -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level
    with new_world(1):
        configure_logging("worker", "error")
        assert (list(root.handlers), root.level) != before
    assert (list(root.handlers), root.level) == before


def test_sleep_takes_virtual_time_by_the_clock_of_each_process() -> None:
    with new_world(1) as world:
        first, second = world.node("first"), world.node("second")

        async def sleep() -> tuple[float, float]:
            before, unix = clock.monotonic(), clock.unix_s()
            await asyncio.sleep(3600)
            return clock.monotonic() - before, clock.unix_s() - unix

        elapsed, _ = run(world, first, sleep, limit_s=4000)
        assert elapsed == pytest.approx(3600)
        assert world.now == pytest.approx(3600, rel=2e-4)
        assert world.now != 3600
        assert first.monotonic() != second.monotonic()


def test_a_clock_that_is_set_back_leaves_monotonic_time_alone() -> None:
    with new_world(1) as world:
        node = world.node("host")
        before, unix = node.monotonic(), node.unix_ns()
        world.set_back("host", 60)
        assert node.monotonic() == before
        assert unix - node.unix_ns() == 60 * 10**9


def test_a_killed_process_runs_no_finally() -> None:
    ran: list[str] = []

    async def main() -> None:
        async def generate() -> AsyncIterator[int]:
            try:
                yield 1
                await asyncio.Event().wait()
            finally:
                ran.append("generator")

        try:
            async for _ in generate():
                pass
        finally:
            ran.append("main")

    with new_world(1) as world:
        node = world.node("host")
        node.start(main)
        world.at(1.0, node.kill)
        world.run(lambda: world.now > 2 or node.is_dead, 10)
        assert node.is_dead
        assert not ran


def test_a_stopped_process_goes_on_where_it_was() -> None:
    with new_world(1) as world:
        node, seen = world.node("host"), []

        async def main() -> None:
            for _ in range(9):
                await asyncio.sleep(1)
                seen.append(world.now)

        node.start(main)
        world.at(2.5, node.stop)
        world.at(10.5, node.go_on)
        world.run(lambda: len(seen) == 4, 20)
        assert [round(at) for at in seen[:3]] == [1, 2, 10]


def test_threads_run_in_virtual_time() -> None:
    with new_world(1) as world:
        node = world.node("host")

        async def main() -> tuple[str, str]:
            async with asyncio.timeout(1):
                result = await asyncio.to_thread(lambda: "done")
            try:
                await asyncio.get_running_loop().run_in_executor(None, lambda: 1 // 0)
            except ZeroDivisionError:
                return result, "raised"
            return result, ""

        assert run(world, node, main) == ("done", "raised")
        assert world.now > 0


def test_a_group_cancels_its_tasks_in_the_same_order_always() -> None:
    ended: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(20):
                group.create_task(wait(number))
            await asyncio.sleep(1)
            group.create_task(asyncio.to_thread(lambda: 1 // 0))

    with new_world(1) as world:
        with pytest.raises(ExceptionGroup):
            run(world, world.node("host"), main)
        assert ended == list(range(20))


def test_random_numbers_come_from_the_seed() -> None:
    def draw(seed: int) -> list[Any]:
        with new_world(seed) as world:

            async def main() -> list[Any]:
                return [entropy.random_hex(8), entropy.random_uuid(), entropy.uniform(0, 1)]

            return run(world, world.node("host"), main)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_waiting_for_what_never_comes_is_found() -> None:
    with new_world(1) as world, pytest.raises(StuckError, match="nothing can happen"):
        run(world, world.node("host"), asyncio.Event().wait)


def test_running_without_end_is_found() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110 (that is the fault)
            await asyncio.sleep(0)

    with new_world(1) as world, pytest.raises(StuckError, match="no time passes"):
        run(world, world.node("host"), spin)


class Pair:
    """A server that answers endless streams, and a client, on two hosts."""

    def __init__(self, world: World) -> None:
        self.world, self.network = world, Network(world)
        self.server, self.client = world.node("server"), world.node("client")
        self.ended: list[float] = []
        for node in (self.server, self.client):
            SimTransport.install(self.network, node)
        self.server.start(self.serve)

    async def serve(self) -> None:
        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            try:
                yield b"first"
                await asyncio.sleep(20)
                yield b"second"
                await asyncio.Event().wait()
            finally:
                self.ended.append(self.world.now)

        method = grpc.unary_stream_rpc_method_handler(stream)
        handlers = grpc.method_handlers_generic_handler("test.Probe", {"Call": method})
        await RpcServer.start("server:7", lambda server: server.add_generic_rpc_handlers((handlers,)), [])
        await asyncio.Event().wait()

    async def read(self) -> tuple[str, float]:
        """Reads until the stream fails. Returns the error, and the seconds since the first message."""
        async with open_channel("server:7") as channel:
            call = channel.unary_stream(_CALL)(b"", wait_for_ready=True)
            await call.read()
            began = self.world.now
            try:
                while True:
                    await call.read()
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name}: {error.details()}", self.world.now - began


@pytest.mark.parametrize(
    ("breaks", "how", "between_s", "server_learns"),
    [
        (lambda pair: pair.server.kill(), "Socket closed", (4, 5.1), False),
        (lambda pair: pair.network.power_off("server"), "ping timeout", (14, 26), False),
        (lambda pair: pair.network.cut("client", "server"), "ping timeout", (14, 60), True),
        (lambda pair: pair.network.cut("server", "client"), "ping timeout", (14, 60), True),
        (lambda pair: pair.network.connections[0].reset(), "Connection reset by peer", (4, 5.1), True),
    ],
    ids=["death of a process", "death of a machine", "cut there", "cut back", "reset"],
)
def test_the_ends_of_a_connection_learn_of_its_end(
    breaks: Callable[[Pair], None], how: str, between_s: tuple[float, float], server_learns: bool
) -> None:
    with new_world(1) as world:
        pair = Pair(world)
        world.at(5, lambda: breaks(pair))
        seen, after_s = run(world, pair.client, pair.read)
        assert seen == f"UNAVAILABLE: {how}"
        assert between_s[0] < after_s < between_s[1]
        if server_learns:
            world.run(lambda: bool(pair.ended), 100)
        assert bool(pair.ended) == server_learns


def test_a_way_that_is_cut_for_a_moment_loses_nothing() -> None:
    with new_world(1) as world:
        pair = Pair(world)
        world.at(19, lambda: pair.network.cut("server", "client"))
        world.at(22, lambda: pair.network.heal("server", "client"))
        seen: list[Any] = []

        async def read() -> None:
            async with open_channel("server:7") as channel:
                call = channel.unary_stream(_CALL)(b"", wait_for_ready=True)
                seen.extend([await call.read(), await call.read()])

        run(world, pair.client, read)
        assert seen == [b"first", b"second"]
        assert world.now > 22


def test_messages_keep_their_order_over_a_way_that_is_cut_and_heals() -> None:
    with new_world(1) as world:
        network = Network(world)
        pipe = Pipe(network, world.node("a"), world.node("b"), "pipe")
        arrived: list[int] = []
        for number in range(400):
            world.at(number / 1000, lambda number=number: pipe.send("message", lambda: arrived.append(number)))
        for start in range(1, 8):
            world.at(start / 20, lambda: network.cut("a", "b"))
            world.at(start / 20 + 0.03, lambda: network.heal("a", "b"))
        world.run(lambda: len(arrived) == 400, 10)
        assert arrived == sorted(arrived)
