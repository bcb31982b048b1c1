"""One rank in a process of its own: `python -m tests.support.rank_process RANK SIZE HOST:PORT WHAT BY`.

It exchanges tensors BY `memory` that ranks share, or by `messages`.

Meets in a daemon thread, as a worker does, says so on stdout, then does one of
    sum     prints what a sum, columns side by side and the least number are, waits for a line on stdin, returns
    rank    goes on to a step of its own number, which no other rank has
    wait    waits for a line on stdin, then for a sum
"""

import sys
import threading

import torch

from tests.support.apart_worker import keep_apart
from worker_svc import parallel
from worker_svc.ranks import Ranks
from worker_svc.settings import WorkerSettings
from worker_svc.shared_ranks import SharedMemoryRanks

VOCAB_SIZE = 5


def run(ranks: Ranks, what: str) -> None:
    print("met", flush=True)
    if what == "sum":
        total = ranks.sum(torch.full((2,), float(ranks.rank + 1)))
        shard = ranks.shard(VOCAB_SIZE)
        columns = ranks.gather_columns(torch.arange(shard.start, shard.end).float().unsqueeze(0), VOCAB_SIZE)
        print(total.tolist(), columns.tolist(), ranks.smallest(ranks.rank + 3, -ranks.rank), flush=True)
        sys.stdin.readline()
    elif what == "rank":
        ranks.agree(1, ranks.rank)
    else:
        sys.stdin.readline()
        ranks.sum(torch.zeros(1))


def meet_and_run(settings: WorkerSettings, what: str, by: str) -> None:
    ranks = parallel.meet(settings, torch.device("cpu"))
    assert isinstance(ranks, SharedMemoryRanks) == (by == "memory")
    run(ranks, what)


def main(rank: str, size: str, address: str, what: str, by: str) -> None:
    if by == "messages":
        keep_apart()
    # Without a pause between two looks at the store, so that the end of the process meets one.
    parallel._BEAT_S = 0.0
    settings = WorkerSettings(
        tensor_parallel_rank=int(rank), tensor_parallel_size=int(size), tensor_parallel_address=address
    )
    thread = threading.Thread(target=meet_and_run, args=(settings, what, by), daemon=True)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
