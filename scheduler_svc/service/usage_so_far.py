"""What a request has cost that ends before its time."""

import dataclasses

from scheduler_svc.core.events import usage_of
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step_plan import Usage


def usage_so_far(scheduler: Scheduler | None, key: RequestKey, now: float) -> Usage | None:
    """None where the request is not live (any more), or nothing was ever attached. `now` is of the core's clock."""
    group = None if scheduler is None else scheduler.group(key)
    return None if group is None else _until(now, group)


def _until(now: float, group: SequenceGroup) -> Usage:
    """What it is in the middle of lasts until now."""
    usage, line = usage_of(group), group.timeline
    if line.started is None:
        return dataclasses.replace(usage, queue_s=now - line.arrived)
    if line.first_token is None:
        return dataclasses.replace(usage, prefill_s=now - line.started)
    return dataclasses.replace(usage, decode_s=now - line.first_token)
