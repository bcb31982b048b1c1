"""What a request has cost that ends before its time."""

from scheduler_svc.core.events import Usage, usage_of
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup


def usage_so_far(scheduler: Scheduler | None, key: RequestKey, now: float) -> Usage | None:
    """None where the request is not live (any more), or nothing was ever attached. `now` is of the core's clock."""
    group = None if scheduler is None else scheduler.group(key)
    return None if group is None else _until(now, group)


def _until(now: float, group: SequenceGroup) -> Usage:
    """Its usage, with the current phase counted up to `now`."""
    usage, line = usage_of(group), group.timeline
    if line.started is None:
        return usage._replace(queue_s=now - line.arrived)
    if line.first_token is None:
        return usage._replace(prefill_s=now - line.started)
    return usage._replace(decode_s=now - line.first_token)
