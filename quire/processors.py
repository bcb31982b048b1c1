"""How many processors this process may use: what it may run on, and what a container's limit leaves of that."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def num_processors(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """At least 1. A limit such as 2.5 processors counts as 2: threads beyond it are stopped until the next period."""
    available = len(os.sched_getaffinity(0))
    return max(1, min([available, *(int(limit) for limit in _limits(cgroups, own))]))


def _limits(cgroups: Path, own: Path) -> Iterator[float]:
    """Processors that the control groups around this process allow it, where they do not allow all."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit_of = cgroups, _limit_of_version_2
        elif "cpu" in controllers.split(","):
            root, limit_of = cgroups / "cpu", _limit_of_version_1
        else:
            continue
        # Inside a container the path may be that of the host, of which only the root is to be seen.
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(root) and (limit := limit_of(directory)) is not None:
                yield limit


def _limit_of_version_2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else None


def _limit_of_version_1(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _read(file: Path) -> str:
    """Empty where the file is not there or not ours to read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
