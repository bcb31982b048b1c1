"""Times GPU work: by events, with cold caches, as the median of many runs."""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# More bytes than the L2 of any GPU: written before each run, so that the run's inputs come from memory.
FLUSH_BYTES = 256 << 20
# Repeated writes take a millisecond, longer than Python takes to queue an operation, so the GPU never waits for it.
FLUSHES = 16
# Maximum time of one figure.
BUDGET_S = 0.5


def graph_seconds(function: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """The median time of one call as a replay of a CUDA graph, as in decode steps."""
    work = partial(function, *arguments, **options)
    _warm_up(work)
    recorded = torch.cuda.CUDAGraph()
    # If a recording fails, `torch.cuda.graph` leaves its own stream the current one.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(recorded):
        work()
    return _median(recorded.replay)


def seconds(function: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """The median time of one plain call, for copies from the host, which no graph can hold."""
    work = partial(function, *arguments, **options)
    _warm_up(work)
    return _median(work)


def _warm_up(work: Callable[[], object]) -> None:
    for _ in range(3):
        work()
    torch.cuda.synchronize()


def _median(run: Callable[[], object]) -> float:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    fastest = min(_timed(run, flush, 3))
    return statistics.median(_timed(run, flush, max(5, min(50, int(BUDGET_S / (fastest + 1e-3))))))


def _timed(run: Callable[[], object], flush: torch.Tensor, repeats: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        for _ in range(FLUSHES):
            flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairs]
