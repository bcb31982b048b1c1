"""Groups of checks and figures: an error costs its own group, and what was found is there whenever a run ends."""

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu_checks import Check
from bench.gpu_figures import Figure
from bench.gpu_findings import Findings
from bench.gpu_groups import Collector, DeviceLostError

CHECK = Check("rms_norm", "float16", 1e-4, 2e-3)
FIGURE = Figure("decode", "GB/s", 3000.0, 4000.0, 12.5, 0.85)


def good() -> Iterator[int]:
    yield from (3, 4)


def bad() -> Iterator[int]:
    yield 1
    raise ValueError("out of memory")


def make_collector(findings: Findings, *, works: bool = True) -> Collector:
    return Collector(findings, lambda: None, lambda: works)


def soon() -> float:
    return time.monotonic() + 60


def test_an_error_in_one_group_does_not_take_the_others_along(capsys: pytest.CaptureFixture[str]) -> None:
    findings, taken = Findings(3), list[int]()
    make_collector(findings).collect([("bad", bad()), ("good", good())], taken.append, soon())
    assert taken == [1, 3, 4]
    assert (findings.begun, findings.broken) == (["bad", "good"], ["bad"])
    assert "out of memory" in capsys.readouterr().err


def test_an_error_between_groups_leaves_what_came_before(capsys: pytest.CaptureFixture[str]) -> None:
    def groups() -> Iterator[tuple[str, Iterator[int]]]:
        yield "good", good()
        raise ImportError("no such kernel")

    findings, taken = Findings(3), list[int]()
    make_collector(findings).collect(groups(), taken.append, soon())
    assert taken == [3, 4]
    assert findings.broken == ["what comes before the next group"]
    assert "no such kernel" in capsys.readouterr().err


def test_no_group_is_begun_after_the_deadline() -> None:
    never: Iterator[int] = iter(int, 0)
    findings = Findings(3)
    make_collector(findings).collect([("slow", never)], print, time.monotonic() - 1)
    assert (findings.begun, findings.late) == ([], ["slow"])


def test_no_group_is_begun_on_a_device_that_is_lost() -> None:
    findings, taken = Findings(3), list[int]()
    with pytest.raises(DeviceLostError, match="bad"):
        make_collector(findings, works=False).collect([("bad", bad()), ("good", good())], taken.append, math.inf)
    assert taken == [1]
    assert (findings.begun, findings.broken) == (["bad"], ["bad"])


def test_another_run_begins_only_what_was_not_begun(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "gpu.json"
    findings = Findings(3, [CHECK], [FIGURE], late=["tilings"])
    taken: list[int] = []
    with pytest.raises(DeviceLostError):
        make_collector(findings, works=False).collect([("bad", bad())], taken.append, math.inf)
    findings.write(path, {"title": "kernels"})
    values = json.loads(path.read_text())
    assert (values["title"], values["seed"]) == ("kernels", 3)
    assert (values["checks"][0]["passed"], values["no_time_left"]) == (True, ["tilings"])
    later = Findings.read(path)
    assert later == replace(findings, late=[])
    make_collector(later).collect([("bad", bad()), ("good", good())], taken.append, math.inf)
    assert taken == [1, 3, 4]
    assert later.broken == ["bad"]


def test_a_run_that_is_killed_within_a_group_leaves_it_broken(tmp_path: Path) -> None:
    path, findings = tmp_path / "gpu.json", Findings(3)
    seen: list[list[str]] = []
    collector = Collector(findings, lambda: findings.write(path, {}), lambda: True)
    collector.collect([("good", good())], lambda _: seen.append(Findings.read(path).broken), math.inf)
    assert seen == [["good"], ["good"]]
    assert findings.broken == []


def test_what_is_left_is_done_by_another_process_that_knows_what_was_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[list[str], Findings]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        calls.append((command, Findings.read(Path(command[command.index("--resume") + 1]))))
        return subprocess.CompletedProcess(command, 7)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "bench.gpu", "--only", "decode"])
    findings = Findings(5, [CHECK], [FIGURE], ["decode"], ["decode"])
    assert gpu._run_another(findings, time.monotonic() + 100) == 7
    ((command, handed),) = calls
    assert command[1:5] == ["-m", "bench.gpu", "--only", "decode"]
    assert 90 < float(command[command.index("--seconds") + 1]) <= 100
    assert handed == findings
