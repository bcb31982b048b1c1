"""`quire replay`: runs a scheduler's recording again on this machine, without workers."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.runtime.settings import ConfigurationError, load_settings, setting
from scheduler_svc.recording.files import RecordingError
from scheduler_svc.recording.replay import Report, replay

PROGRAM = "quire replay"
_INTERRUPTED_EXIT_STATUS = 130


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    """Runs the scheduler's core again on a file of `quire scheduler --record FILE`, and compares the planned steps with
    the recorded ones. The exit status is 0 if all are equal, else 1."""

    file: str | None = setting(None, "the recording", positional=True)
    check: bool = setting(True, "check the core's invariants after each operation, which takes most of the time")
    steps: bool = setting(False, "print a line for each step")


def main(argv: Sequence[str]) -> int:
    """Prints the size of the replay and its differences; returns 0 if every step is planned as it was."""
    flags = load_settings(ReplayFlags, argv, os.environ, program=PROGRAM)
    if flags.file is None:
        raise ConfigurationError("give the file that `quire scheduler --record FILE` wrote")
    try:
        report = replay(Path(flags.file), checks=flags.check, show=print if flags.steps else None)
    except RecordingError as error:
        raise ConfigurationError(str(error)) from error
    _print(report)
    if report.is_interrupted:
        print(f"{PROGRAM}: interrupted: the rest of the recording was not replayed", file=sys.stderr)
        return _INTERRUPTED_EXIT_STATUS
    return 0 if report.is_equal else 1


def _print(report: Report) -> None:
    if report.damage is not None:
        print(f"{PROGRAM}: warning: {report.damage}; what comes before was replayed", file=sys.stderr)
    for line in report.differences:
        print(line)
    if report.num_differences > len(report.differences):
        print(f"... and {report.num_differences - len(report.differences)} more differences")
    if report.ended_early is not None:
        print(f"the replay ends there: {report.ended_early}")
    told = f"{report.num_operations} operations, {report.num_requests} requests, {report.num_steps} steps"
    print(f"{told}: {'all as recorded' if report.is_equal else f'{report.num_differences} differ from the recording'}")
