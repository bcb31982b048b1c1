"""The processors and the memory that this process may use: those of the machine, within its container's limit."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def num_processors(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """At least 1. A limit such as 2.5 processors counts as 2: threads beyond it are stopped until the next period."""
    available = len(os.sched_getaffinity(0))
    return max(1, min([available, *(int(limit) for limit in _limits(cgroups, own))]))


def have_cores_of_their_own(processors: Collection[int], system: Path = Path("/sys/devices/system/cpu")) -> bool:
    """Whether no two of these processors are threads of one core. False where the system does not say."""
    cores = [_read(system / f"cpu{processor}/topology/thread_siblings_list") for processor in processors]
    return all(cores) and len(set(cores)) == len(cores)


def available_memory(
    cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS, machine: Path = Path("/proc/meminfo")
) -> int | None:
    """Bytes that can be allocated now without a process being killed; None where the system does not say."""
    in_kib = _fields(machine).get("MemAvailable:")
    available = [] if in_kib is None else [in_kib * 1024]
    available += [left for group in _groups_of("memory", cgroups, own) if (left := _memory_left(group)) is not None]
    return max(min(available), 0) if available else None


def _memory_left(group: Path) -> int | None:
    """The free memory within the limit of a control group; the page cache of its files counts as free."""
    for limit, usage, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        allowed, used = _read(group / limit), _read(group / usage)
        if allowed.isdecimal() and used.isdecimal():
            statistics = _fields(group / "memory.stat")
            cached = sum(statistics.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
            return int(allowed) - int(used) + cached
    return None


def _limits(cgroups: Path, own: Path) -> Iterator[float]:
    """Processors that the control groups around this process allow it, where they do not allow all."""
    for group in _groups_of("cpu", cgroups, own):
        for limit in (_limit_of_version_2(group), _limit_of_version_1(group)):
            if limit is not None:
                yield limit


def _groups_of(controller: str, cgroups: Path, own: Path) -> Iterator[Path]:
    """The control groups around this process in which a controller sets limits, the innermost first."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root = cgroups
        elif controller in controllers.split(","):
            root = cgroups / controller
        else:
            continue
        # Inside a container the path may be that of the host, of which only the root is visible.
        group = root / path.lstrip("/")
        yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(root))


def _limit_of_version_2(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdecimal() else None


def _limit_of_version_1(group: Path) -> float | None:
    quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _fields(file: Path) -> dict[str, int]:
    """The numbers by name in a file that has one of each a line."""
    lines = (line.split() for line in _read(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _read(file: Path) -> str:
    """Empty where the file is not there or not ours to read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
