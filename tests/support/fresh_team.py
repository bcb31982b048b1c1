"""A process that imports OpenMP as a worker does and binds a team of three threads to two processors. Prints, as JSON,
the processors of a thread while the model would be loaded, and the processors of each thread of three later teams:
three threads, fewer, which ends a thread, and three again."""

import ctypes
import json
import os
from collections.abc import Sequence

from worker_svc.settings import WorkerSettings
from worker_svc.thread_binding import placed_threads

_TEAMS = (3, 2, 3)


def main() -> None:
    own = os.sched_getaffinity
    first, second, *_ = sorted(own(0))
    # The worker sees three processors, also where the machine has two.
    os.sched_getaffinity = lambda _: [first, second, second]  # pyrefly: ignore[bad-assignment]
    with placed_threads(WorkerSettings(device="cpu", num_threads=max(_TEAMS))):
        import torch

        from quire_kernels.cpu.library import find_open_mp
        from worker_svc.parallel.ranks import Ranks
        from worker_svc.startup import bind_threads
    runtime = ctypes.CDLL(str(find_open_mp()))

    def processors_of(num_threads: int) -> Sequence[Sequence[int]]:
        found: list[Sequence[int]] = [()] * num_threads

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def look(_: int | None) -> None:
            found[runtime.omp_get_thread_num()] = sorted(own(0))

        runtime.GOMP_parallel(look, None, num_threads, 0)
        return found

    torch.set_num_threads(max(_TEAMS))
    loading = processors_of(1)
    bind_threads(Ranks())
    print(json.dumps([loading, *map(processors_of, _TEAMS)]), flush=True)
    # Threads of OpenMP need not end before the interpreter.
    os._exit(0)


if __name__ == "__main__":
    main()
