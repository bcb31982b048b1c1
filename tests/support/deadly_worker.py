"""`python -m tests.support.deadly_worker`: the real worker, which dies of requests with the seed DEADLY_SEED as for
want of memory: it is killed in the middle of a step, once one of them has DEADLY_LENGTH tokens. Of those with
HANGING_SEED its device hangs at that length."""

import os
import signal
import sys
import time
from collections.abc import Callable

from worker_svc.__main__ import main
from worker_svc.device.runner import ModelRunner
from worker_svc.step import AdmittedStep

DEADLY_SEED = 666
HANGING_SEED = 667
DEADLY_LENGTH = 30


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    while True:
        time.sleep(1)


def call_at(seed: int, length: int, call: Callable[[], None]) -> None:
    """From now on a step that computes so many tokens of a row that draws with this seed calls this first."""
    rows: set[int] = set()
    launch = ModelRunner.launch

    def call_and_launch(self: ModelRunner, admitted: AdmittedStep, queue_us: int = 0):
        changes, batch = admitted.step.row_changes, admitted.step.batch
        rows.difference_update(changes.release.tolist())
        rows.difference_update(each.row for each in changes.assign)
        rows.update(each.row for each in changes.assign if each.sampling.seed == seed)
        lengths = (batch.num_computed_tokens + batch.num_new_tokens).tolist()
        if any(row in rows and end >= length for row, end in zip(batch.rows.tolist(), lengths, strict=True)):
            call()
        return launch(self, admitted, queue_us)

    ModelRunner.launch = call_and_launch


if __name__ == "__main__":
    call_at(DEADLY_SEED, DEADLY_LENGTH, die)
    call_at(HANGING_SEED, DEADLY_LENGTH, hang)
    sys.exit(main())
