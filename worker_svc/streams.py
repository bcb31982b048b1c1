"""Streams of device work: the marks by which one waits for another, times of stages, and small arrays to the device.

Within a stream work runs in the order in which it was queued. On a device without streams, as the CPU, nothing waits.
"""

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.runtime import clock


class Mark:
    """A place in a stream; in this class, of a device without streams."""

    def is_passed(self) -> bool:
        """Whether all that was queued before it is done. Does not wait."""
        return True

    def wait(self) -> None:
        """Blocks the calling thread until then."""


class Stream:
    """Work that runs in order; in this class, of a device that has done all work when it was queued."""

    def mark(self) -> Mark:
        """A mark behind all that is queued so far."""
        return Mark()

    def wait_for(self, mark: Mark) -> None:
        """Makes later work of the queue start after the mark. Does not block the calling thread."""

    def used(self) -> AbstractContextManager[object]:
        """A context in which torch and Triton queue here."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class Streams:
    """The streams of one worker."""

    compute: Stream
    swaps: Stream
    """Blocks on their way to the host and back."""
    results: Stream
    """Results on their way to the host."""

    @classmethod
    def on_device(cls, device: torch.device) -> "Streams":
        """To be called in the thread that queues steps: work that it queues outside a context goes to `compute`."""
        if device.type != "cuda":
            return cls(Stream(), Stream(), Stream())
        compute = torch.cuda.current_stream(device)
        swaps, results = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return cls(CudaStream(compute), CudaStream(swaps), CudaStream(results))


class CudaMark(Mark):
    """A recorded event. A thread that waits for it sleeps."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_passed(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        # A thread without a current device would get a context on the first one, hundreds of MiB of another rank's GPU.
        with torch.cuda.device(self.event.device):
            self.event.synchronize()


class CudaStream(Stream):
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


class Stopwatch:
    """Times of the stages of one step on the device; on CUDA by events, which do not block the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        """Ends a stage."""
        if self._on_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._times.append(clock.monotonic())

    @property
    def elapsed_s(self) -> float:
        """Since the last mark but one was set, on the CPU."""
        return clock.monotonic() - self._times[-2]

    def stages_us(self) -> list[int]:
        """Duration of each stage in microseconds. To be called when the device has passed the last mark."""
        if self._on_cuda:
            return [round(a.elapsed_time(b) * 1000) for a, b in itertools.pairwise(self._marks)]
        return [int((b - a) * 1e6) for a, b in itertools.pairwise(self._times)]


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on the device. On CUDA it goes through pinned memory in stream order, and the host does not wait.

    On the CPU the tensor shares the array's memory, so the caller must not write to it any more.
    """
    # torch warns about read-only memory, as views of messages are.
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
