"""One processor for each thread of an operation on the CPU (ADR 0011)."""

import ctypes
import logging
import os
from collections.abc import Sequence

import torch

from kernels.cpu.library import LibraryUnavailableError, find_open_mp
from worker_svc.parallel.ranks import Ranks

# What users of OpenMP set to say the same themselves.
_OWN_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_logger = logging.getLogger(__name__)


def bind_threads(ranks: Ranks) -> None:
    """Binds the calling thread and its OpenMP team, where `processors_for` finds them places."""
    if any(name in os.environ for name in _OWN_BINDING):
        return
    processors = processors_for(ranks, torch.get_num_threads(), sorted(os.sched_getaffinity(0)))
    if not processors:
        return
    try:
        bind_team(processors)
    except LibraryUnavailableError as error:
        _logger.warning("threads stay unbound: %s", error)
        return
    _logger.info("threads are bound to processors %s", ", ".join(map(str, processors)))


def processors_for(ranks: Ranks, num_threads: int, available: Sequence[int]) -> Sequence[int]:
    """A processor for each thread of this rank; none where there are more or fewer threads than processors.

    With fewer, the kernel has a free one to move a thread to when something else wants to run, and does better.
    """
    if len(available) < 2 or num_threads * ranks.size != len(available):
        return ()
    return available[ranks.rank * num_threads : (ranks.rank + 1) * num_threads]


def bind_team(processors: Sequence[int]) -> None:
    """Binds each thread of the calling thread's OpenMP team, itself included, to one of `processors`.

    Raises:
        LibraryUnavailableError: torch runs on no OpenMP runtime that is known here.
    """
    path = find_open_mp()
    try:
        runtime = ctypes.CDLL(str(path))
        run_on_team, thread_num = runtime.GOMP_parallel, runtime.omp_get_thread_num
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"{path} is no OpenMP runtime to share: {error}") from error

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def bind(_: int | None) -> None:
        os.sched_setaffinity(0, {processors[thread_num()]})

    run_on_team(bind, None, len(processors), 0)
