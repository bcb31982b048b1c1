"""The scheduler's step loop without workers: requests come and end, and no step runs."""

import time

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.kept_requests import DurableLimits
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.requests import Requests
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.service.tracing import RequestSpans
from scheduler_svc.settings import SchedulerSettings


def make_step_loop(scheduler: Scheduler, metrics: SchedulerMetrics | None = None) -> tuple[StepLoop, Requests]:
    """A loop that drives this core, and the table of its requests."""
    limits = DurableLimits(8, 10_000, 60.0)
    requests = Requests(lambda key: loop.replica.abort(key), lambda key: loop.replica.progress(key), limits)
    settings = SchedulerSettings(listen="127.0.0.1:0", workers=("127.0.0.1:1",))
    spans = RequestSpans(None, time.monotonic)
    loop = StepLoop(settings, requests, metrics or SchedulerMetrics(), spans, lambda is_ready: None)
    loop.replica.scheduler = scheduler
    return loop, requests
