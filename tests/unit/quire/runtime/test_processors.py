"""Limits of containers count, in addition to the processors of the machine."""

import os
from pathlib import Path

import pytest

from quire.runtime.processors import available_memory, cores, in_nodes_of, num_nodes, num_processors

AVAILABLE = len(os.sched_getaffinity(0))


@pytest.fixture
def limited(tmp_path: Path):
    """Control groups in a test directory: their files, and the groups of this process."""

    def limited(own: str, **files: str) -> int:
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        (tmp_path / "own").write_text(own)
        return num_processors(tmp_path, tmp_path / "own")

    return limited


def test_the_tightest_group_around_the_process_counts_also_of_version_1_and_where_no_path_is_seen(limited) -> None:
    assert limited("0::/a/b\n", **{"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}) == 1
    files = {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}
    assert limited("3:memory:/\n2:cpu,cpuacct:/\n", **files) == 1
    assert limited("2:cpu,cpuacct:/\n", **(files | {"cpu/cpu.cfs_quota_us": "-1"})) == AVAILABLE
    # The limit is rounded down, but to at least 1.
    for quota, expected in (("50000", 1), ("190000", 1), ("max", AVAILABLE), ("99900000", AVAILABLE)):
        assert limited("0::/kubepods/pod7\n", **{"cpu.max": f"{quota} 100000"}) == expected


@pytest.mark.parametrize("quota", ["", "max", "150000", "x 100000", "150000 x", "100000 0", "-100000 100000"])
def test_a_quota_that_is_none_sets_no_limit(quota: str, limited) -> None:
    allowed, _, period = quota.partition(" ")
    assert limited("0::/\n", **{"cpu.max": quota}) == AVAILABLE
    of_version_1 = {"cpu/cpu.cfs_quota_us": allowed, "cpu/cpu.cfs_period_us": period}
    assert limited("2:cpu:/\n", **of_version_1) == AVAILABLE


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max", "memory.current": "9000"}, 8192),
        ("0::/\n", {"memory.max": "7000", "memory.current": "6000"}, 1000),
        ("0::/a\n", {"a/memory.max": "7000", "a/memory.current": "7000", "memory.max": "9", "memory.current": "10"}, 0),
        (
            "0::/\n",
            {"memory.max": "7000", "memory.current": "6000", "memory.stat": "anon 7\nactive_file 20\ninactive_file 3"},
            1023,
        ),
        ("3:memory:/\n", {"memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "1000"}, 4000),
    ],
)
def test_memory_is_what_the_machine_and_the_limits_of_containers_leave(
    tmp_path: Path, own: str, files: dict[str, str], expected: int
) -> None:
    for name, text in {"own": own, "meminfo": "MemTotal: 99 kB\nMemAvailable:    8 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_memory(tmp_path, tmp_path / "own", tmp_path / "meminfo") == expected


def test_a_system_that_tells_nothing_has_no_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path / "own", tmp_path / "meminfo") is None
    assert num_processors(tmp_path, tmp_path / "missing") == AVAILABLE


def test_cores_are_told_from_their_threads_and_lie_by_numa_node(tmp_path: Path) -> None:
    """A machine of two nodes with two cores of two threads each; processor numbers alternate between the nodes."""
    for number, processors in enumerate(("0,2,4,6", "1,3,5,7")):
        (tmp_path / f"node/node{number}").mkdir(parents=True)
        (tmp_path / f"node/node{number}/cpulist").write_text(f"{processors}\n")
    for processor, siblings in enumerate(("0,4", "1,5", "2,6", "3,7") * 2):
        topology = tmp_path / f"cpu/cpu{processor}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cores(range(8), tmp_path) == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert cores([7, 1, 4, 2], tmp_path) == [[2], [4], [1], [7]]
    assert [num_nodes(each, tmp_path) for each in ([0, 6], [0, 7])] == [1, 2]
    assert in_nodes_of([1, 3], range(6), tmp_path) == {1, 3, 5}
    assert cores([0, 8], tmp_path) == []
    assert in_nodes_of([0], [0, 1], tmp_path / "nothing") == {0, 1}
