"""A process that has imported a worker's modules, and has done nothing yet. Its words say the one thing that it does:

    modules PREFIX ...        prints which of the modules that begin so were imported: by the worker's services, and by
                              operations of the kernels, once recorded and once run
    families OWN FOREIGN      loads a model of Quire's own and prints which modules of transformers that imported; then
                              prints the refusal of another one where transformers is not installed
    team THREADS              binds a team of threads; prints the processors of each
All of them print JSON.
"""

import json
import os
import sys
import threading
from pathlib import Path

import torch

import worker_svc.app
import worker_svc.startup
from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.recording import record
from worker_svc.models.registry import load_model
from worker_svc.parallel.ranks import Ranks


def imported(*prefixes: str) -> list[str]:
    return sorted(name for name in sys.modules if name.startswith(prefixes))


def threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def modules(*prefixes: str) -> object:
    x, weight = torch.ones(2, 8), torch.ones(8)
    outputs: list[torch.Tensor] = []
    record(2, lambda: outputs.append(ops.rms_norm(x, weight, 1e-6)))
    ops.silu_and_mul(torch.ones(2, 4))
    ops.copy_blocks([torch.ones(2, 2, 1, 1, 8)], torch.tensor([[0, 1]]))
    return imported(*prefixes)


def families(own: str, foreign: str) -> object:
    def load(directory: str) -> None:
        load_model(Path(directory), device=torch.device("cpu"), dtype=torch.float32)

    load(own)
    found = imported("transformers")
    sys.modules["transformers"] = None  # type: ignore[assignment]
    try:
        load(foreign)
    except ConfigurationError as error:
        return found, str(error)
    return found, None


def team(num_threads: str) -> object:
    torch.set_num_threads(int(num_threads))
    before = threads()
    torch.ones(1 << 20).add_(1)  # the team starts with the first operation that is worth it
    members = {str(threading.get_native_id()), *threads() - before}
    worker_svc.startup.bind_threads(Ranks())
    return sorted(sorted(os.sched_getaffinity(int(member))) for member in members)


def main(what: str, *words: str) -> None:
    doings = {"modules": modules, "families": families, "team": team}
    print(json.dumps(doings[what](*words)), flush=True)
    # To free every object, a fork would copy the page of each.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
