"""How many requests the gateway has run and how long they took, summed since its start."""

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Durations:
    """So many durations, together so long."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


class RequestStatistics:
    """Sums over all requests that were accepted and are over, by whatever front end they came.

    Attributes:
        completed: Requests that completed, from their arrival to the end of their call.
        failed: Requests that failed or were given up, likewise.
        queued: Of the completed ones, the time until the first step that ran them.
        computed: Of the completed ones, the time from there to their last token.
        last_completed_at_s: When the last one completed, in seconds since the Unix epoch; None where none has.
    """

    def __init__(self) -> None:
        self.completed = Durations()
        self.failed = Durations()
        self.queued = Durations()
        self.computed = Durations()
        self.last_completed_at_s: float | None = None

    def add_completed(self, seconds: float, *, queue_seconds: float, compute_seconds: float) -> None:
        self.completed.add(seconds)
        self.queued.add(queue_seconds)
        self.computed.add(compute_seconds)
        self.last_completed_at_s = time.time()

    def add_failed(self, seconds: float) -> None:
        self.failed.add(seconds)
