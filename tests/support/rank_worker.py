"""A worker, for forks (tests.support.forked): `main(BY, FLAG, ...)`, as a rank that exchanges tensors BY `memory` that
ranks share or by `messages`."""

import sys

import worker_svc.startup  # noqa: F401
from tests.support.apart_worker import keep_apart
from worker_svc.__main__ import main as run_worker


def main(by: str, *flags: str) -> None:
    if by == "messages":
        keep_apart()
    sys.exit(run_worker(flags))
