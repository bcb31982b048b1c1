"""Memory that a request takes while it waits, by the file that allocates it."""

import random
import tracemalloc
from array import array
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from bench.rule_source import make_request
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler

_PROMPT_LEN = 161
_VOCAB_SIZE = 32_000
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class WaitingMemory:
    """Bytes of one of `count` waiting requests.

    `by_file` has the files that allocate them, largest first; files of `bench` stand for the service's objects of a
    message: the prompt with its token ids, the request and its names.
    """

    count: int
    prompt_len: int
    bytes_each: float
    by_file: dict[str, float]


def measure_waiting(count: int) -> WaitingMemory:
    """Submits `count` requests to a scheduler that never plans a step."""
    config = SchedulerConfig(
        num_blocks=1024,
        block_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        max_waiting_requests=count,
        max_waiting_tokens=count * _PROMPT_LEN,
    )
    scheduler = Scheduler(config)
    rng = random.Random(0)
    prompts = [array("i", (rng.randrange(_VOCAB_SIZE) for _ in range(_PROMPT_LEN))) for _ in range(count)]
    tracemalloc.start()
    try:
        for index, prompt in enumerate(prompts):
            scheduler.submit(make_request(index, prompt.tolist(), 338), 0.0)
        snapshot = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    sizes: Counter[str] = Counter()
    for each in snapshot.statistics("filename"):
        sizes[_short(each.traceback[0].filename)] += each.size
    by_file = {name: size / count for name, size in sizes.most_common() if size >= count}
    return WaitingMemory(count, _PROMPT_LEN, sizes.total() / count, by_file)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(_ROOT)) if path.is_relative_to(_ROOT) else path.name
