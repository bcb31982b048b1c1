"""A processor for each thread of the worker's operations (ADR 0011): the part that runs before torch is imported."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.runtime.processors import cores, in_nodes_of, num_processors
from worker_svc.settings import WorkerSettings

OWN_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables by which users of OpenMP bind threads themselves."""
_OWN_NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def processors_for(rank: int, num_ranks: int, num_threads: int, cores: Sequence[Sequence[int]]) -> Sequence[int]:
    """A processor for each thread of a rank, if the number of threads of all ranks is the number of cores or of
    processors; else none.

    With fewer threads, the system moves a thread to a free core when another program runs, which is faster.

    Args:
        cores: The processors of each core (`quire.runtime.processors.cores`).
    """
    first, every = [core[0] for core in cores], [processor for core in cores for processor in core]
    chosen = next((each for each in (first, every) if len(each) == num_threads * num_ranks), [])
    if len(every) < 2:
        return ()
    return chosen[rank * num_threads : (rank + 1) * num_threads]


@contextmanager
def placed_threads(settings: WorkerSettings) -> Iterator[None]:
    """For a block that imports torch, and OpenMP with it: OpenMP binds each thread that it ever creates.

    A team of fewer threads than the one before ends the others, and the next larger team creates them anew. Without a
    place of its own, a new thread runs on the processors of the thread that creates it, which is bound to one.
    """
    processors = _planned_processors(settings)
    if not processors:
        yield
        return
    available = os.sched_getaffinity(0)
    places = ",".join(f"{{{processor}}}" for processor in processors)
    os.environ.update(OMP_PLACES=places, OMP_PROC_BIND="close")
    try:
        yield
    finally:
        del os.environ["OMP_PLACES"], os.environ["OMP_PROC_BIND"]
        # OpenMP has bound the thread that imports it. Threads that load a model must not be bound, but stay near the
        # memory of the bound threads: memory lies in the node of the thread that uses it first.
        os.sched_setaffinity(0, in_nodes_of(processors, available))


def _planned_processors(settings: WorkerSettings) -> Sequence[int]:
    """The processors that the threads will be bound to; none if that depends on torch."""
    if settings.thread_binding == "off" or settings.device == "cuda" or any(name in os.environ for name in OWN_BINDING):
        return ()
    known = cores(os.sched_getaffinity(0))
    num_threads = settings.num_threads
    if num_threads is None:
        if any(name in os.environ for name in _OWN_NUMBER):
            return ()
        # As torch takes by itself.
        num_threads = min(len(known), num_processors())
    return processors_for(settings.tensor_parallel_rank, settings.tensor_parallel_size, num_threads, known)
