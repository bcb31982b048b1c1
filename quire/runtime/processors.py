"""The processors and the memory that this process may use, within its machine and its container's limit."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_SYSTEM = Path("/sys/devices/system")


def num_processors(cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """At least 1. A limit such as 2.5 processors counts as 2: threads beyond it are stopped until the next period."""
    available = len(os.sched_getaffinity(0))
    return max(1, min([available, *(int(limit) for limit in _limits(cgroups, own))]))


def cores(processors: Collection[int], system: Path = _SYSTEM) -> list[list[int]]:
    """The processors of each core, which are several where a core runs several threads; cores of one NUMA node are side
    by side. Empty where the system does not say."""
    node_of = {processor: number for number, node in enumerate(_nodes(system)) for processor in node}
    siblings: dict[str, list[int]] = {}
    for processor in sorted(processors):
        siblings.setdefault(_read(system / f"cpu/cpu{processor}/topology/thread_siblings_list"), []).append(processor)
    return [] if "" in siblings else sorted(siblings.values(), key=lambda core: (node_of.get(core[0], 0), core))


def num_nodes(processors: Collection[int], system: Path = _SYSTEM) -> int:
    """The number of NUMA nodes, each with memory of its own, that these processors belong to."""
    return max(1, sum(not node.isdisjoint(processors) for node in _nodes(system)))


def in_nodes_of(processors: Collection[int], available: Collection[int], system: Path = _SYSTEM) -> set[int]:
    """The `available` processors that share a NUMA node with one of `processors`."""
    near = set[int]().union(*(node for node in _nodes(system) if not node.isdisjoint(processors)))
    return near & set(available) or set(available)


def _nodes(system: Path) -> list[set[int]]:
    """The processors of each NUMA node, by the nodes' numbers."""
    files = sorted((system / "node").glob("node*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    return [_listed(_read(file)) for file in files]


def _listed(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    ranges = (part.partition("-") for part in text.split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def available_memory(
    cgroups: Path = _CGROUPS, own: Path = _OWN_CGROUPS, machine: Path = Path("/proc/meminfo")
) -> int | None:
    """Bytes that can be allocated now without a process being killed; None if the system does not say."""
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
    """Processors that the control groups around this process allow it, for each group with a limit."""
    for group in _groups_of("cpu", cgroups, own):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        of_version_1 = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        for allowed, within in ((quota, period), of_version_1):
            if allowed.isdecimal() and within.isdecimal() and int(within):
                yield int(allowed) / int(within)


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
        # Inside a container the path may be the host's; only its root is visible.
        group = root / path.lstrip("/")
        yield from (directory for directory in (group, *group.parents) if directory.is_relative_to(root))


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
