"""The memory that requests take as they were sent: one bound for the bodies of all clients, over HTTP and gRPC."""

from collections.abc import Callable

from quire.rpc.errors import ResourceExhausted

_RETRY_MS = 1000


class BodyMemory:
    """Counts the bytes of all request bodies that are held, those that are still arriving among them.

    When they are too many, the body that has been arriving for longest is given up, and not the one that came last: a
    client that sends half a body and waits takes memory from nobody, and a body is refused only if it comes more slowly
    than all others together. Bodies that came whole are kept; where they alone fill the memory, a new one is refused.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        # In order of their beginning.
        self._arriving: dict[HeldBody, None] = {}

    def begin(self, on_refusal: Callable[[], None]) -> "HeldBody":
        """A body of which nothing has come. `on_refusal` is called when it is given up for others."""
        body = HeldBody(self, on_refusal)
        self._arriving[body] = None
        return body

    def refusal(self) -> ResourceExhausted:
        """The error of a body for which there is no memory."""
        return ResourceExhausted(
            f"the bodies of all requests may take {self._max_bytes:,} bytes together (--max-total-body-bytes), and "
            "there is no room for this one; try again",
            reason="BODIES_FULL",
            retry_after_ms=_RETRY_MS,
        )

    def _grow(self, body: "HeldBody", num_bytes: int) -> None:
        """Raises ResourceExhausted: there is no room for it."""
        while self._num_bytes + num_bytes > self._max_bytes:
            longest = next((each for each in self._arriving if each.num_bytes or each is body), body)
            longest.release()
            if longest is body:
                raise self.refusal()
            longest.on_refusal()
        self._num_bytes += num_bytes
        body.num_bytes += num_bytes

    def _complete(self, body: "HeldBody") -> None:
        self._arriving.pop(body, None)

    def _release(self, body: "HeldBody") -> None:
        self._arriving.pop(body, None)
        self._num_bytes -= body.num_bytes
        body.num_bytes = 0


class HeldBody:
    """One body. `add` it piece by piece, then `complete` it, and `release` it when its request is over."""

    __slots__ = ("_memory", "num_bytes", "on_refusal")

    def __init__(self, memory: BodyMemory, on_refusal: Callable[[], None]) -> None:
        self._memory = memory
        self.num_bytes = 0
        self.on_refusal = on_refusal

    def add(self, num_bytes: int) -> None:
        """Counts a piece that came. Raises ResourceExhausted, and releases the body, where there is no room for it."""
        self._memory._grow(self, num_bytes)

    def complete(self) -> None:
        """It came whole, and is given up for no other one any more."""
        self._memory._complete(self)

    def release(self) -> None:
        """Counts it no more. Idempotent."""
        self._memory._release(self)
