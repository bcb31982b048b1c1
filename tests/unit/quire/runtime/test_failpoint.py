"""Failpoints: their names, and the effects of files in a watched directory."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from contextvars import copy_context
from pathlib import Path

import pytest

from quire.runtime import failpoint
from quire.runtime.settings import ConfigurationError
from quire_cli.supervisor.commands import child_environ

ROOT = Path(__file__).parents[4]
NAME = "worker.step.sealed"


def names_in(path: Path) -> set[str]:
    if "failpoint(" not in (text := path.read_text()):
        return set()
    return {
        str(node.args[0].value)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "failpoint"
        and isinstance(node.args[0], ast.Constant)
    }


def test_each_name_is_passed_somewhere_and_documented() -> None:
    packages = ("gateway", "scheduler_svc", "worker_svc")
    passed = set().union(*(names_in(path) for package in packages for path in (ROOT / package).rglob("*.py")))
    assert passed == set(failpoint.NAMES)
    documented = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/internals/failpoints.md").read_text(), re.MULTILINE)
    assert documented == list(failpoint.NAMES)


def test_nothing_happens_unless_armed(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("kill 1")
    failpoint.arm({})
    failpoint.failpoint(NAME)
    assert (tmp_path / NAME).exists()


def test_a_process_dies_at_the_pass_that_the_file_says_and_its_successor_lives(tmp_path: Path) -> None:
    program = (
        "import os; from quire.runtime import failpoint; failpoint.arm(os.environ)\n"
        f"for number in range(5): failpoint.failpoint('{NAME}'); print(number, flush=True)"
    )
    environ = os.environ | {failpoint.VARIABLE: str(tmp_path)}
    (tmp_path / NAME).write_text("kill 3")
    first, second = (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True)
        for _ in range(2)
    )
    assert first.returncode == -signal.SIGKILL
    assert first.stdout.split() == ["0", "1"]
    assert second.returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_delay_lasts_as_long_as_its_file(tmp_path: Path) -> None:
    def pass_armed() -> tuple[float, float]:
        failpoint.arm({failpoint.VARIABLE: str(tmp_path)})
        (tmp_path / NAME).write_text("delay 0.05")
        started = time.monotonic()
        failpoint.failpoint(NAME)
        delayed = time.monotonic()
        (tmp_path / NAME).unlink()
        failpoint.failpoint(NAME)
        return delayed - started, time.monotonic() - delayed

    slow, fast = copy_context().run(pass_armed)
    assert slow >= 0.05 > fast


def test_what_is_no_directory_is_refused_and_services_inherit_that_of_their_supervisor(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no directory"):
        failpoint.arm({failpoint.VARIABLE: str(tmp_path / "absent")})
    assert child_environ({failpoint.VARIABLE: "/somewhere"})[failpoint.VARIABLE] == "/somewhere"
