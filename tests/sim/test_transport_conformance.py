"""The properties of grpc.aio that Quire relies on, checked with real connections and with the simulated ones. A
difference between them is a failure, of the simulation or of our beliefs about gRPC."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from quire.client.connection import open_channel as open_spread_channel
from quire.rpc.channel import open_channel
from quire.rpc.errors import FieldViolation, InvalidArgument, ResourceExhausted, from_rpc_error
from quire.rpc.interceptors import CallEnds
from quire.rpc.server import RpcServer
from quire_torture.link import Link
from tests.sim.world.network import Network
from tests.sim.world.transport import SimTransport
from tests.sim.world.world import new_world

_SERVICE = "test.Probe"
_LIMIT_S = 30.0
_CHUNK, _MOST_CHUNKS = StringValue(value="x" * 65_536), 4096
EOF = cast(Any, grpc.aio).EOF


@dataclass
class Setting:
    """A server and its clients over one transport."""

    address: str
    servers: list[RpcServer] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    """Events that handlers record."""
    in_server: Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]] = lambda make: make()
    """Runs a coroutine in the server's process."""
    network: Network | None = None
    link: Link | None = None

    async def serve(self, kind: str, handler: Any, **options: Any) -> str:
        """Serves one method, /test.Probe/Call, of a kind such as "unary_stream"."""
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        method = make(
            handler,
            request_deserializer=StringValue.FromString,
            response_serializer=StringValue.SerializeToString,
        )
        handlers = grpc.method_handlers_generic_handler(_SERVICE, {"Call": method})

        async def start() -> str:
            server = await RpcServer.start(
                self.address, lambda server: server.add_generic_rpc_handlers((handlers,)), [], **options
            )
            self.servers.append(server)
            return server.address

        return await self.in_server(start)

    async def behind_a_link(self, address: str) -> str:
        """An address that leads to the server by a connection that can be reset."""
        if self.network is not None:
            return address
        self.link = Link(lambda: address)
        await self.link.start()
        return self.link.address

    def reset_connections(self) -> None:
        if self.link is not None:
            self.link.reset()
        else:
            assert self.network is not None
            for connection in list(self.network.connections):
                connection.reset()

    async def wait(self, *_: Any) -> Any:
        """A handler that never answers."""
        self.seen.append("began")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise

    async def stop(self, grace_s: float) -> None:
        await self.in_server(lambda: self.servers[-1].stop(grace_s))


def call(channel: grpc.aio.Channel, kind: str, method: str = "Call") -> Any:
    return getattr(channel, kind)(
        f"/{_SERVICE}/{method}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )


def text(value: str) -> StringValue:
    return StringValue(value=value)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_LIMIT_S):
        while not condition():  # noqa: ASYNC110 (the other side may be in another loop)
            await asyncio.sleep(0.001)


async def _stops_growing(chunks: list[Any]) -> bool:
    """True once a writer of chunks waits, and False if it wrote all its chunks. The windows of a fast connection grow
    to tens of MiB."""
    before = -1
    while before != len(chunks):
        before = len(chunks)
        await asyncio.sleep(0.1)
    return before < _MOST_CHUNKS


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """The result of an awaitable, or the name of its failure."""
    try:
        result = await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code().name
    except asyncio.CancelledError:
        return "cancelled"
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
        return type(error).__name__
    return result.value if isinstance(result, StringValue) else result


# Behaviours. Each returns its observations, which must equal the expectation in its decorator.

_BEHAVIOURS: list[tuple[Callable[[Setting], Awaitable[Any]], Any]] = []


def behaves(expected: Any) -> Callable[[Any], Any]:
    def add(behaviour: Any) -> Any:
        _BEHAVIOURS.append((behaviour, expected))
        return behaviour

    return add


async def _echo(request: Any, context: Any) -> Any:
    return text(f"{request.value}!")


@behaves("hi!")
async def unary_answers(setting: Setting) -> Any:
    async with open_channel(await setting.serve("unary_unary", _echo)) as channel:
        return await outcome(call(channel, "unary_unary")(text("hi")))


@behaves("UNIMPLEMENTED")
async def unknown_method(setting: Setting) -> Any:
    async with open_channel(await setting.serve("unary_unary", _echo)) as channel:
        return await outcome(call(channel, "unary_unary", "Nothing")(text("hi")))


@behaves(("INVALID_ARGUMENT", "BAD", ["field: is bad"], 70, "told"))
async def errors_carry_details(setting: Setting) -> Any:
    async def refuse(request: Any, context: Any) -> Any:
        if request.value == "full":
            raise ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_ms=70)
        raise InvalidArgument("it is bad", reason="BAD", violations=[FieldViolation("field", "is bad")])

    async with open_channel(await setting.serve("unary_unary", refuse)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as first:
            await call(channel, "unary_unary")(text("bad"))
        with pytest.raises(grpc.aio.AioRpcError) as second:
            await call(channel, "unary_unary")(text("full"))
    bad, full = from_rpc_error(first.value), from_rpc_error(second.value)
    told = "told" if "grpc-status-details-bin" in dict(first.value.trailing_metadata() or ()) else None
    violations = [f"{each.field}: {each.description}" for each in bad.violations]
    return bad.code.name, bad.reason, violations, full.retry_after_ms, told


@behaves("INTERNAL")
async def unexpected_error_is_internal(setting: Setting) -> Any:
    async def fail(request: Any, context: Any) -> Any:
        raise KeyError("a fault")

    async with open_channel(await setting.serve("unary_unary", fail)) as channel:
        return await outcome(call(channel, "unary_unary")(text("hi")))


@behaves("INVALID_ARGUMENT")
async def damaged_request_is_refused(setting: Setting) -> Any:
    async with open_channel(await setting.serve("unary_unary", _echo)) as channel:
        return await outcome(channel.unary_unary(f"/{_SERVICE}/Call")(b"\xff\xff\xff"))


@behaves((("x-one", "1"), ("x-two", "2"), "DEADLINE"))
async def metadata_goes_both_ways(setting: Setting) -> Any:
    async def handler(request: Any, context: Any) -> Any:
        setting.seen.append(dict(context.invocation_metadata() or ()).get("x-one"))
        await context.send_initial_metadata((("x-two", "2"),))
        return text("DEADLINE" if context.time_remaining() is not None else "")

    async with open_channel(await setting.serve("unary_unary", handler)) as channel:
        made = call(channel, "unary_unary")(text("hi"), metadata=(("x-one", "1"),), timeout=30)
        answer = await made
        back = dict(await made.initial_metadata())
    return ("x-one", setting.seen[0]), ("x-two", back["x-two"]), answer.value


@behaves((["0", "1", "2"], "OK", []))
async def unary_stream_ends(setting: Setting) -> Any:
    async def count(request: Any, context: Any) -> AsyncIterator[Any]:
        for number in range(3):
            yield text(str(number))

    async with open_channel(await setting.serve("unary_stream", count)) as channel:
        made = call(channel, "unary_stream")(text("go"))
        values = [each.value async for each in made]
        return (
            values,
            (await made.code()).name,
            [each.value async for each in call(channel, "unary_stream")(text(""))][3:],
        )


@behaves((["a", "b"], "ABORTED", True))
async def messages_before_an_error_arrive(setting: Setting) -> Any:
    """The same holds if the error was there before the first message was read."""

    async def fail_late(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")
        yield text("b")
        setting.seen.append("sent")
        await context.abort(grpc.StatusCode.ABORTED, "over")

    async with open_channel(await setting.serve("unary_stream", fail_late)) as channel:
        made = call(channel, "unary_stream")(text("go"))
        await until(lambda: bool(setting.seen))
        await asyncio.sleep(0.02)
        values = []
        code = None
        try:
            async for each in made:
                values.append(each.value)
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        return values, code, made.done()


@behaves("ab")
async def stream_unary_collects(setting: Setting) -> Any:
    async def join(requests: Any, context: Any) -> Any:
        return text("".join([each.value async for each in requests]))

    async def parts() -> AsyncIterator[Any]:
        yield text("a")
        yield text("b")

    async with open_channel(await setting.serve("stream_unary", join)) as channel:
        return await outcome(call(channel, "stream_unary")(parts()))


async def _echo_each(requests: Any, context: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield text(f"{request.value}!")


@behaves(["a!", "b!", "EOF", "OK"])
async def stream_stream_talks(setting: Setting) -> Any:
    async with open_channel(await setting.serve("stream_stream", _echo_each)) as channel:
        made = call(channel, "stream_stream")()
        seen = []
        for value in "ab":
            await made.write(text(value))
            seen.append((await made.read()).value)
        await made.done_writing()
        seen.append("EOF" if await made.read() is EOF else "?")
        return [*seen, (await made.code()).name]


@behaves(("NOT_FOUND", "InvalidStateError"))
async def read_raises_what_ended_the_stream(setting: Setting) -> Any:
    async def refuse(requests: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            await context.abort(grpc.StatusCode.NOT_FOUND, "none")
            yield text("")

    async with open_channel(await setting.serve("stream_stream", refuse)) as channel:
        made = call(channel, "stream_stream")()
        await made.write(text("a"))
        first = await outcome(made.read())
        await until(made.done)
        return first, await outcome(made.write(text("b")))


@behaves(("cancelled", True, "CANCELLED", ["cancelled"]))
async def cancel_reaches_the_handler(setting: Setting) -> Any:
    async with open_channel(await setting.serve("unary_unary", setting.wait)) as channel:
        made = call(channel, "unary_unary")(text("hi"))
        waiting = asyncio.ensure_future(outcome(made))
        await until(lambda: bool(setting.seen))
        made.cancel()
        result = await waiting
        await until(lambda: len(setting.seen) > 1)
        return result, made.cancelled(), (await made.code()).name, setting.seen[1:]


@behaves(("cancelled", ["generator", "cancelled"]))
async def cancel_ends_a_stream_and_its_generators(setting: Setting) -> Any:
    async def endless(requests: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield text("a")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            setting.seen.append("cancelled")
            raise
        finally:
            setting.seen.insert(0, "generator")

    async with open_channel(await setting.serve("stream_stream", endless)) as channel:
        made = call(channel, "stream_stream")()
        assert (await made.read()).value == "a"
        reading = asyncio.ensure_future(outcome(made.read()))
        await asyncio.sleep(0.01)
        made.cancel()
        result = await reading
        await until(lambda: len(setting.seen) > 1)
        return result, setting.seen


@behaves(("DEADLINE_EXCEEDED", ["cancelled", True]))
async def deadline_ends_both_sides(setting: Setting) -> Any:
    async def wait(request: Any, context: Any) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await until(lambda: context.time_remaining() == 0)
            setting.seen.extend(["cancelled", context.time_remaining() == 0])
            raise

    async with open_channel(await setting.serve("unary_unary", wait)) as channel:
        result = await outcome(call(channel, "unary_unary")(text("hi"), timeout=0.15))
        await until(lambda: len(setting.seen) > 1)
        return result, setting.seen


@behaves("RESOURCE_EXHAUSTED")
async def large_requests_are_refused(setting: Setting) -> Any:
    address = await setting.serve("unary_unary", _echo, max_message_bytes=1000)
    async with open_channel(address) as channel:
        return await outcome(call(channel, "unary_unary")(text("x" * 2000)))


@behaves("RESOURCE_EXHAUSTED")
async def large_answers_are_refused(setting: Setting) -> Any:
    async def large(request: Any, context: Any) -> Any:
        return text("x" * 2000)

    async with open_channel(await setting.serve("unary_unary", large), max_message_bytes=1000) as channel:
        return await outcome(call(channel, "unary_unary")(text("hi")))


@behaves((True, True))
async def writer_waits_for_a_reader_that_does_not_read(setting: Setting) -> Any:
    async def flood(request: Any, context: Any) -> AsyncIterator[Any]:
        while "enough" not in setting.seen and len(setting.seen) < _MOST_CHUNKS:
            setting.seen.append("chunk")
            yield _CHUNK

    async with open_channel(await setting.serve("unary_stream", flood)) as channel:
        made = call(channel, "unary_stream")(text("go"))
        await made.read()
        waits = await _stops_growing(setting.seen)
        num_written = len(setting.seen)
        setting.seen.append("enough")
        num_read = 1
        while await made.read() is not EOF:
            num_read += 1
        return waits, num_read == num_written


@behaves((True, True))
async def client_waits_for_a_server_that_does_not_read(setting: Setting) -> Any:
    async def slow(requests: Any, context: Any) -> Any:
        await anext(requests)
        await until(lambda: "go on" in setting.seen)
        num = 1
        async for _ in requests:
            num += 1
        return text(str(num))

    async with open_channel(await setting.serve("stream_unary", slow)) as channel:
        made = call(channel, "stream_unary")()
        sent: list[None] = []

        async def write() -> None:
            while "go on" not in setting.seen and len(sent) < _MOST_CHUNKS:
                await made.write(_CHUNK)
                sent.append(None)
            await made.done_writing()

        writing = asyncio.ensure_future(write())
        waits = await _stops_growing(sent)
        setting.seen.append("go on")
        await writing
        return waits, (await made).value == str(len(sent))


@behaves(("UNAVAILABLE", "hi!"))
async def a_call_fails_at_once_without_a_server_unless_it_waits(setting: Setting) -> Any:
    address = await setting.serve("unary_unary", _echo)
    await setting.stop(0)
    async with open_channel(address) as channel:
        first = await outcome(call(channel, "unary_unary")(text("hi")))
        waiting = asyncio.ensure_future(
            outcome(call(channel, "unary_unary")(text("hi"), wait_for_ready=True, timeout=30))
        )
        await asyncio.sleep(0.05)
        setting.address = address
        await setting.serve("unary_unary", _echo)
        return first, await waiting


@behaves(("UNAVAILABLE", ["began", "cancelled"]))
async def stop_ends_calls(setting: Setting) -> Any:
    async def wait(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")
        await setting.wait()

    async with open_channel(await setting.serve("unary_stream", wait)) as channel:
        made = call(channel, "unary_stream")(text("go"))
        await made.read()
        await setting.stop(0)
        seen_here = await outcome(made.read())
        # The client may learn of it first.
        await until(lambda: len(setting.seen) > 1)
        return seen_here, setting.seen


@behaves(("b", "EOF", "UNAVAILABLE"))
async def stop_with_grace_lets_calls_end(setting: Setting) -> Any:
    async def two(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")
        await until(lambda: "stopping" in setting.seen)
        await asyncio.sleep(0.05)
        yield text("b")

    async with open_channel(await setting.serve("unary_stream", two)) as channel:
        made = call(channel, "unary_stream")(text("go"))
        await made.read()
        setting.seen.append("stopping")
        stopping = asyncio.ensure_future(setting.stop(20))
        second = (await made.read()).value
        end = "EOF" if await made.read() is EOF else "?"
        await stopping
        return second, end, await outcome(call(channel, "unary_stream")(text("go")).read())


@behaves(("cancelled", "UsageError", ["cancelled"]))
async def closing_a_channel_ends_its_calls(setting: Setting) -> Any:
    channel = open_channel(await setting.serve("unary_unary", setting.wait))
    made = call(channel, "unary_unary")
    waiting = asyncio.ensure_future(outcome(made(text("hi"))))
    await until(lambda: bool(setting.seen))
    await channel.close()
    result = await waiting
    await until(lambda: len(setting.seen) > 1)

    async def again() -> Any:
        return await made(text("hi"))

    return result, await outcome(again()), setting.seen[1:]


@behaves([("other", "UNIMPLEMENTED"), ("other", "OK"), ("other", "CANCELLED")])
async def interceptors_see_how_calls_end(setting: Setting) -> Any:
    ends: list[tuple[str, str]] = []

    async def handler(request: Any, context: Any) -> Any:
        if request.value == "wait":
            setting.seen.append("began")
            await asyncio.Event().wait()
        return text("")

    reports = CallEnds(frozenset(), lambda method, code: ends.append((method, code.name)))
    async with open_channel(await setting.serve("unary_unary", handler, interceptors=(reports,))) as channel:
        await outcome(call(channel, "unary_unary", "Nothing")(text("")))
        await call(channel, "unary_unary")(text(""))
        made = call(channel, "unary_unary")(text("wait"))
        await until(lambda: bool(setting.seen))
        made.cancel()
        await until(lambda: len(ends) == 3)
        return ends


@behaves(["IDLE", "READY", "IDLE"])
async def connectivity_is_told(setting: Setting) -> Any:
    channel = open_channel(await setting.serve("unary_unary", _echo))
    states = [channel.get_state().name]
    await channel.channel_ready()
    states.append(channel.get_state().name)
    await setting.stop(0)
    await until(lambda: channel.get_state().name != "READY")
    states.append(channel.get_state().name)
    await channel.close()
    return states


@behaves(("cancelled", True))
async def a_cancelled_reader_cancels_its_call(setting: Setting) -> Any:
    async def wait(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")
        await asyncio.Event().wait()

    async with open_channel(await setting.serve("unary_stream", wait)) as channel:
        made = call(channel, "unary_stream")(text("go"))
        await made.read()
        reading = asyncio.ensure_future(outcome(made.read()))
        await asyncio.sleep(0.01)
        reading.cancel()
        return await reading, made.cancelled()


@behaves(("UNAVAILABLE", ["began", "cancelled"], "hi!"))
async def a_lost_connection_ends_its_calls_and_the_next_one_connects_again(setting: Setting) -> Any:
    async def wait(request: Any, context: Any) -> Any:
        return text("hi!") if request.value == "hi" else await setting.wait()

    async with open_channel(await setting.behind_a_link(await setting.serve("unary_unary", wait))) as channel:
        waiting = asyncio.ensure_future(outcome(call(channel, "unary_unary")(text("wait"))))
        await until(lambda: bool(setting.seen))
        setting.reset_connections()
        result = await waiting
        await until(lambda: len(setting.seen) > 1)
        again = ""
        # A call may still be placed on the connection that has just died.
        for _ in range(10):
            again = await outcome(call(channel, "unary_unary")(text("hi"), wait_for_ready=True, timeout=20))
            if again != "UNAVAILABLE":
                break
        return result, setting.seen, again


@behaves(("UNAVAILABLE", "InvalidStateError"))
async def a_stream_over_a_lost_connection_says_so_to_its_reader(setting: Setting) -> Any:
    address = await setting.behind_a_link(await setting.serve("stream_stream", _echo_each))
    async with open_channel(address) as channel:
        made = call(channel, "stream_stream")()
        await made.write(text("a"))
        await made.read()
        reading = asyncio.ensure_future(outcome(made.read()))
        await asyncio.sleep(0.01)
        setting.reset_connections()
        return await reading, await outcome(made.write(text("b")))


@behaves(["a!", "b!"])
async def messages_keep_their_order_and_arrive_without_a_reader(setting: Setting) -> Any:
    async with open_channel(await setting.serve("stream_stream", _echo_each)) as channel:
        made = call(channel, "stream_stream")()
        for value in "ab":
            await made.write(text(value))
        await made.done_writing()
        await asyncio.sleep(0.02)
        return [each.value async for each in made]


@behaves(("b", "UsageError", "EOF", "OK"))
async def a_stream_that_is_read_outlives_its_channel(setting: Setting) -> Any:
    """`Channel.close` finds calls by their grpc.aio tasks, and this call has none."""

    async def two(request: Any, context: Any) -> AsyncIterator[Any]:
        yield text("a")
        await until(lambda: "closed" in setting.seen)
        yield text("b")

    channel = open_channel(await setting.serve("unary_stream", two))
    made = call(channel, "unary_stream")
    stream = made(text("go"))
    await stream.read()
    reading = asyncio.ensure_future(outcome(stream.read()))
    await asyncio.sleep(0.01)
    await channel.close()
    setting.seen.append("closed")
    second = await reading

    async def again() -> Any:
        return await made(text("go")).read()

    return second, await outcome(again()), "EOF" if await stream.read() is EOF else "?", (await stream.code()).name


@behaves(("DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"))
async def a_deadline_holds_for_calls_that_wait_for_a_connection(setting: Setting) -> Any:
    address = await setting.serve("unary_unary", _echo)
    await setting.stop(0)
    async with open_channel(address) as channel:
        first = await outcome(call(channel, "unary_unary")(text("hi"), wait_for_ready=True, timeout=0.05))
        stream = call(channel, "unary_unary")(text("hi"), wait_for_ready=True, timeout=0.05)
        return first, (await stream.code()).name


@behaves(["DEADLINE_EXCEEDED", "b", "OK"])
async def what_handlers_set_reaches_the_caller(setting: Setting) -> Any:
    async def handler(request: Any, context: Any) -> Any:
        if request.value == "code":
            context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
            context.set_details("too late")
        context.set_trailing_metadata((("x-end", "b"),))
        return text("OK")

    async with open_channel(await setting.serve("unary_unary", handler)) as channel:
        failed = await outcome(call(channel, "unary_unary")(text("code")))
        made = call(channel, "unary_unary")(text(""))
        answer = await outcome(made)
        return [failed, dict(await made.trailing_metadata())["x-end"], answer]


@behaves((["a", "b"], ["b"], "UNAVAILABLE"))
async def calls_spread_over_several_addresses(setting: Setting) -> Any:
    def named(name: str) -> Any:
        async def handler(request: Any, context: Any) -> Any:
            return text(name)

        return handler

    addresses = [await setting.serve("unary_unary", named("a"))]
    if setting.address.startswith("unix:"):
        setting.address += "-b"
    addresses.append(await setting.serve("unary_unary", named("b")))
    if setting.network is not None:
        # The system resolves the names in a list.
        setting.network.names["10.0.0.1"] = "server"
        addresses = [address.replace("server:", "10.0.0.1:") for address in addresses]

    async def answers() -> list[str]:
        return sorted({await outcome(call(channel, "unary_unary")(text(""))) for _ in range(10)})

    async with open_spread_channel(grpc.aio, addresses, None) as channel:
        while (both := await answers()) != ["a", "b"]:  # noqa: ASYNC110 (nothing says when both are connected)
            # The second connection takes a moment longer.
            await asyncio.sleep(0.01)
        await setting.in_server(lambda: setting.servers[0].stop(0))
        await asyncio.sleep(0.2)
        one = await answers()
        await setting.stop(0)
        await asyncio.sleep(0.2)
        return both, one, (await answers())[0]


async def over_grpc(setting: Setting, behaviour: Callable[[Setting], Awaitable[Any]]) -> Any:
    try:
        # Not by a cancellation, which behaviours may mistake for one of gRPC's.
        task = asyncio.ensure_future(behaviour(setting))
        await asyncio.wait([task], timeout=_LIMIT_S)
        assert task.done(), "it hangs"
        return task.result()
    finally:
        for server in setting.servers:
            await server.stop(0)
        if setting.link is not None:
            setting.link.close()


def over_the_simulation(behaviour: Callable[[Setting], Awaitable[Any]], seed: int) -> Any:
    with new_world(seed) as world:
        network = Network(world)
        server, client = world.node("server"), world.node("client")
        for node in (server, client):
            SimTransport.install(network, node)

        async def in_server(make: Callable[[], Awaitable[Any]]) -> Any:
            async def run() -> Any:
                return await make()

            task = server.start(run)
            while not task.done():  # noqa: ASYNC110 (it runs in another loop)
                await asyncio.sleep(0.001)
            return task.result()

        setting = Setting("server:0", in_server=in_server, network=network)

        async def run_client() -> Any:
            return await behaviour(setting)

        task = client.start(run_client)
        world.run(task.done, limit_s=_LIMIT_S)
        assert not server.errors
        assert not client.errors
        return task.result()


@pytest.mark.parametrize(("behaviour", "expected"), [pytest.param(*each, id=each[0].__name__) for each in _BEHAVIOURS])
@pytest.mark.parametrize("transport", ["tcp", "unix", "simulated"])
async def test_transports_behave_alike(
    transport: str, behaviour: Callable[[Setting], Awaitable[Any]], expected: Any, tmp_path: Path
) -> None:
    if transport == "simulated":
        for seed in range(5):
            assert over_the_simulation(behaviour, seed) == expected
    else:
        address = "127.0.0.1:0" if transport == "tcp" else f"unix:{tmp_path / 'socket'}"
        assert await over_grpc(Setting(address), behaviour) == expected
