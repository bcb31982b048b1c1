"""The few functions of torch.cuda that the worker's streams and graphs call, without a GPU: each call is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

FREE_BYTES, TOTAL_BYTES, STEP_BYTES = 1 << 30, 1 << 31, 100 << 20


class FakeCuda:
    """`calls` are the calls so far, in order; streams have names, graphs numbers."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.current = "default"
        self.num_streams = self.num_graphs = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fakes: dict[str, Any] = {
            "Stream": lambda device: self._stream(),
            "Event": lambda **_: FakeEvent(self),
            "CUDAGraph": lambda: self._graph(),
            "current_stream": lambda device=None: FakeCudaStream(self, self.current),
            "graph_pool_handle": lambda: "pool",
            "stream": lambda stream: self._used(stream.name, "use"),
            "graph": lambda graph, pool, stream, capture_error_mode: self._recorded(
                stream.name, f"record graph {graph.number} in {pool}, {capture_error_mode},"
            ),
            "device": self._on_device,
            "get_device_name": lambda device: "a GPU",
            "mem_get_info": lambda device: (FREE_BYTES, TOTAL_BYTES),
            "memory_allocated": lambda device: 0,
            "max_memory_allocated": lambda device: STEP_BYTES,
            "reset_peak_memory_stats": lambda device: None,
            "empty_cache": lambda: None,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def work(self) -> None:
        """Stands for work that torch queues on the current stream."""
        self.calls.append(f"work on {self.current}")

    def _stream(self) -> "FakeCudaStream":
        self.num_streams += 1
        return FakeCudaStream(self, f"stream {self.num_streams}")

    def _graph(self) -> "FakeGraph":
        self.num_graphs += 1
        return FakeGraph(self, self.num_graphs)

    @contextmanager
    def _used(self, name: str, what: str) -> Iterator[None]:
        before, self.current = self.current, name
        self.calls.append(f"{what} on {name}" if what != "use" else f"use {name}")
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _recorded(self, name: str, what: str) -> Iterator[None]:
        """As in torch, a recording that fails leaves its stream the current one."""
        before, self.current = self.current, name
        self.calls.append(f"{what} on {name}")
        yield
        self.current = before

    @contextmanager
    def _on_device(self, device: torch.device) -> Iterator[None]:
        self.calls.append(f"to {device}")
        yield
        self.calls.append(f"back from {device}")


class FakeCudaStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: "FakeCudaStream") -> None:
        self._cuda.calls.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: "FakeEvent") -> None:
        self._cuda.calls.append(f"{self.name} waits for {event.place}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self.place = "nothing"
        self.device: torch.device | None = None

    def record(self, stream: FakeCudaStream | None = None) -> None:
        self.place = f"event of {self._cuda.current if stream is None else stream.name}"
        self.device = torch.device("cuda", 0)

    def query(self) -> bool:
        return self.place == "nothing"

    def synchronize(self) -> None:
        self._cuda.calls.append(f"host waits for {self.place}")

    def elapsed_time(self, _: "FakeEvent") -> float:
        return 0.25


class FakeGraph:
    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda = cuda
        self.number = number

    def replay(self) -> None:
        self._cuda.calls.append(f"replay graph {self.number} on {self._cuda.current}")
