"""Calling and waiting, for asyncio and for threads: each name for asyncio has a counterpart for threads.

`quire/client/sync_client.py` is made from `async_client.py` by replacing each name with its counterpart.
"""

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc

from quire.client.types import Texts
from quire.rpc.errors import Cancelled, QuireError, from_rpc_error
from quire.rpc.interceptors import REQUEST_ID_HEADER

Event = threading.Event
Batches = Iterable[Texts]
AsyncBatches = AsyncIterable[Texts] | Iterable[Texts]


class AsyncEvent:
    """A threading.Event for tasks of one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, timeout_s: float) -> None:
        """Returns when the event is set, or after `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


def client_closed() -> Cancelled:
    return Cancelled("the client was closed")


@contextmanager
def cancelled_once(closed: AsyncEvent | Event) -> Generator[None, None, None]:
    """Raises Cancelled in place of the error that gRPC raises for calls on a closed channel: ValueError in one API,
    UsageError in the other."""
    try:
        yield
    except QuireError:
        raise
    except Exception:
        if closed.is_set():
            raise client_closed() from None
        raise


async def async_call(method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
    """The answer of a unary call. Raises its failure as QuireError, Cancelled if the channel was closed meanwhile."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        # grpc.aio also raises it if the channel was closed.
        if _is_task_cancelled():
            raise
        raise client_closed() from None


def call(method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
    """As `async_call`."""
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


async def async_next_response(streaming: Any) -> Any:
    """The next response of a stream. Raises StopAsyncIteration after the last, a failure of the call as QuireError, and
    Cancelled if the call was cancelled on this side. A task that is cancelled while it waits cancels the call."""
    try:
        return await anext(aiter(streaming))
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        # grpc.aio also raises it if the call was cancelled or the channel was closed while this task waited.
        if _is_task_cancelled():
            # grpc.aio does so by itself unless the call's headers have come in the same turn of the event loop.
            streaming.cancel()
            raise
        raise client_closed() from None


def next_response(streaming: Any) -> Any:
    """As `async_next_response`; StopIteration after the last."""
    try:
        return next(streaming)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None


async def async_was_accepted(streaming: Any) -> bool:
    """Whether a gateway accepted the durable request of a stream that has ended, or still had it."""
    return any(name == REQUEST_ID_HEADER for name, _ in await streaming.initial_metadata() or ())


def was_accepted(streaming: Any) -> bool:
    """As `async_was_accepted`."""
    return any(name == REQUEST_ID_HEADER for name, _ in streaming.initial_metadata() or ())


def async_canceller(streaming: Any) -> Callable[[], object]:
    """A function that cancels the call and may run in any thread, as finalizers do."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return lambda: None  # made before its event loop runs

    def cancel() -> None:
        with suppress(RuntimeError):  # the event loop is closed, and its calls with it
            loop.call_soon_threadsafe(streaming.cancel)

    return cancel


def canceller(streaming: Any) -> Callable[[], object]:
    """As `async_canceller`."""
    return streaming.cancel


async def async_requests_of(
    batches: AsyncBatches, make: Callable[[Texts], Any], failures: list[Exception]
) -> AsyncIterator[Any]:
    """The requests of a stream. They end at an error of `batches` or `make`, which is added to `failures`: gRPC would
    log it, and report an error of its own."""
    try:
        if isinstance(batches, AsyncIterable):
            async for batch in batches:
                yield make(batch)
        else:
            for batch in batches:
                yield make(batch)
    except Exception as error:
        failures.append(error)


def requests_of(batches: Batches, make: Callable[[Texts], Any], failures: list[Exception]) -> Iterator[Any]:
    """As `async_requests_of`."""
    try:
        yield from map(make, batches)
    except Exception as error:
        failures.append(error)


def _is_task_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
