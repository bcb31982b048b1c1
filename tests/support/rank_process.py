"""One rank in a process of its own, whose arguments are RANK SIZE HOST:PORT ACTION BY MEETING_S.

It exchanges tensors BY `memory` that ranks share, or by `messages`, and gives the other ranks MEETING_S to come.

It runs the rendezvous in a daemon thread, as a worker does, reports on stdout that lifelines to the others stand, and
then runs one ACTION:
    sum     prints the results of a sum, of columns side by side and of the least number, and stops
    wait    waits for a line on stdin, then for a sum
    fail    runs two steps; the first one fails only on rank 0
To stop it waits for a line on stdin, which is its signal, reports that on stdout, waits for another line and returns.
"""

import socket
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch

from tests.support.apart_worker import keep_apart
from tests.support.steps import make_step
from worker_svc.device.device_loop import DeviceLoop, StepLane
from worker_svc.parallel import rendezvous as parallel
from worker_svc.parallel.ranks import Ranks, SharedMemoryRanks
from worker_svc.parallel.rendezvous import Lifelines, Patience
from worker_svc.settings import WorkerSettings
from worker_svc.step import AdmittedStep, StepOutput, StepTimings

VOCAB_SIZE = 5
_num_held = threading.Semaphore(0)


class CountedLifelines(Lifelines):
    def _wait_for_end(self, connection: socket.socket, rank: int) -> None:
        _num_held.release()
        super()._wait_for_end(connection, rank)


@dataclass(frozen=True, slots=True)
class FailingRunner:
    """Sums over all ranks; steps have no output, and they fail on rank 0."""

    ranks: Ranks
    is_asynchronous: bool = False

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> "FailingRunner":
        self.ranks.agree(admitted.step.scheduler_epoch, admitted.step.step_id)
        self.ranks.sum(torch.zeros(1))
        if self.ranks.rank == 0:
            raise RuntimeError("no room on rank 0")
        return self

    def wait(self) -> StepOutput:
        none = np.zeros(0, np.int32)
        return StepOutput(1, none, none, None, (), (), StepTimings(0, 0, 0, 0))


def run(ranks: Ranks, what: str, stopping: threading.Event) -> None:
    # Rank 0 has a lifeline to each other rank, which has one to rank 0.
    for _ in range(1 if ranks.rank else ranks.size - 1):
        _num_held.acquire()
    print("met", flush=True)
    if what == "sum":
        total = ranks.sum(torch.full((2,), float(ranks.rank + 1)))
        shard = ranks.shard(VOCAB_SIZE)
        columns = ranks.gather_columns(torch.arange(shard.start, shard.end).float().unsqueeze(0), VOCAB_SIZE)
        print(total.tolist(), columns.tolist(), ranks.smallest(ranks.rank + 3, -ranks.rank), flush=True)
        stop(stopping)
    elif what == "fail":
        fail(ranks)
    else:
        sys.stdin.readline()
        ranks.sum(torch.zeros(1))


def stop(stopping: threading.Event) -> None:
    sys.stdin.readline()
    stopping.set()
    print("stopping", flush=True)
    sys.stdin.readline()


def fail(ranks: Ranks) -> None:
    device_loop = DeviceLoop()
    device_loop.use(FailingRunner(ranks), on_failure=ranks.fail)
    device_loop.start()
    lane = StepLane(on_output=print, on_failure=print)
    for step_id in (1, 2):
        device_loop.submit(lane, AdmittedStep(make_step(step_id=step_id), np.zeros(0, np.int32)))
    threading.Event().wait()


def meet_and_run(settings: WorkerSettings, what: str, by: str, patience: Patience) -> None:
    stopping = threading.Event()
    ranks = parallel.rendezvous(settings, torch.device("cpu"), stopping, patience)
    assert isinstance(ranks, SharedMemoryRanks) == (by == "memory")
    run(ranks, what, stopping)


def main(rank: str, size: str, address: str, what: str, by: str, meeting_s: str) -> None:
    if by == "messages":
        keep_apart()
    parallel.Lifelines = CountedLifelines
    # Looks at the store without a pause, so that the process ends during a look.
    patience = Patience(timedelta(seconds=float(meeting_s)), heartbeat_s=0.0)
    settings = WorkerSettings(
        tensor_parallel_rank=int(rank), tensor_parallel_size=int(size), tensor_parallel_address=address
    )
    thread = threading.Thread(target=meet_and_run, args=(settings, what, by, patience), daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
