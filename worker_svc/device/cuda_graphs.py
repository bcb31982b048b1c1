"""Decode graphs on CUDA."""

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from quire.settings import ConfigurationError
from worker_svc.device.decode_graphs import Replay
from worker_svc.device.model_runner import ModelRunner
from worker_svc.models.base import CausalLM, NativeCausalLM

# What torch, Triton and the libraries below set up at a first call must not happen while a graph is recorded.
_WARM_UPS = 2
_logger = logging.getLogger(__name__)


class CudaGraphRecorder:
    """Records on a stream of its own. All graphs share one pool of memory: they never run at the same time, and what
    they give is copied out of it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Replay:
        # The stream starts after all that is queued, and `torch.cuda.graph` waits for the device before it records.
        self._stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # Around all of it: where a recording cannot be ended, `torch.cuda.graph` leaves its stream the current one, and
        # the steps that follow would go there, past every mark.
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                work()
            with _no_garbage_collection(), self._recording(graph):
                work()
        return graph.replay

    def _recording(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        # What other threads ask of the driver meanwhile is no part of it and does not end it.
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What the collector would end may call the driver in ways that end the recording too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_cuda_graphs(model: CausalLM) -> None:
    """ConfigurationError when `--cuda-graphs on` cannot be for this model."""
    if model.device.type != "cuda":
        raise ConfigurationError(
            f"--cuda-graphs is on, which is for cuda, and the device is {model.device.type}; use off"
        )
    if model.ranks.size > 1:
        raise ConfigurationError(
            f"--cuda-graphs is on and --tensor-parallel-size is {model.ranks.size}; graphs are for 1 rank, use off"
        )
    if not isinstance(model, NativeCausalLM):
        raise ConfigurationError(
            f"--cuda-graphs is on and {model.architecture} runs through transformers' code, which may wait for the "
            "device; use off"
        )


def record_cuda_graphs(runner: ModelRunner, device: torch.device) -> None:
    """Records the graphs of a runner. Where that fails, the log says so and decodes are queued kernel by kernel."""
    started, (free, _) = time.monotonic(), torch.cuda.mem_get_info(device)
    try:
        num_graphs = runner.record_graphs(CudaGraphRecorder(device))
    except RuntimeError as error:
        # What broke a recording is the context of the error at its end.
        _logger.warning("decodes run without CUDA graphs, which cannot be recorded: %s", error, exc_info=error)
        return
    taken = (free - torch.cuda.mem_get_info(device)[0]) / 2**20
    _logger.info("%d CUDA graphs in %.1f s and %.0f MiB", num_graphs, time.monotonic() - started, taken)
