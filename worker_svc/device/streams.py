"""Streams of device work, and the marks by which one waits for another.

Within a stream work runs in the order in which it was queued. Where the device has no streams, as the CPU, all work is
done when it was queued and nothing waits.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in a stream."""

    def is_passed(self) -> bool:
        """Whether all that was queued before it is done; does not wait."""
        ...

    def wait(self) -> None:
        """Makes the calling thread wait until that is so."""
        ...


class Stream(Protocol):
    """Work that runs in order."""

    def mark(self) -> Mark:
        """A mark behind all that is queued so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """What is queued from now on starts after the mark; the calling thread goes on."""
        ...

    def used(self) -> AbstractContextManager[object]:
        """What torch and Triton queue in this context goes here."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one worker."""

    compute: Stream
    swaps: Stream
    """Blocks on their way to the host and back."""
    results: Stream
    """Results on their way to the host."""

    @classmethod
    def of(cls, device: torch.device) -> "Streams":
        """To be called in the thread that queues steps: what it queues without a context is `compute`."""
        if device.type != "cuda":
            return cls(IN_ORDER, IN_ORDER, IN_ORDER)
        compute = torch.cuda.current_stream(device)
        swaps, results = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return cls(CudaStream(compute), CudaStream(swaps), CudaStream(results))


class CudaMark:
    """An event that was recorded. A thread that waits for it sleeps."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_passed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        # A thread that has no device yet would get a context on the first one, hundreds of MiB in the memory of another
        # rank.
        with torch.cuda.device(self.event.device):
            self.event.synchronize()


class CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def mark(self) -> CudaMark:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return CudaMark(event)

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, CudaMark), "marks of one device"
        self._stream.wait_event(mark.event)

    def used(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)


class _Done:
    def is_passed(self) -> bool:
        return True

    def wait(self) -> None:
        """All is done."""


class _InOrder:
    def mark(self) -> Mark:
        return _Done()

    def wait_for(self, mark: Mark) -> None:
        """All is done."""

    def used(self) -> AbstractContextManager[object]:
        return nullcontext()


IN_ORDER: Stream = _InOrder()
