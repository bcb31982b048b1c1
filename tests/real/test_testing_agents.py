"""The page docs/testing-agents.md: its agent and its tests run as they are written, in a suite of their own."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from quire.testing import ScriptedServer
from tests.real.packages import installed

PAGE = (Path(__file__).parents[2] / "docs" / "testing-agents.md").read_text()
FILES = dict(re.findall(r'```\w+ title="(\S+)"\n(.*?)```', PAGE, re.DOTALL))


def run_suite(directory: Path, *names: str, environ: Mapping[str, str] = os.environ) -> str:
    """The output of pytest for these files of the page, whose tests must all pass."""
    for name in ("conftest.py", *names):
        (directory / name).write_text(FILES[name])
    tests = [name for name in names if name.startswith("test_")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=prepend", *tests]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.real
def test_the_agent_of_the_page_is_tested(tmp_path: Path) -> None:
    packages = installed(Path(__file__).parent / "sdks" / "requirements.txt")
    root = Path(__file__).parents[2]
    environ = os.environ | {"PYTHONPATH": f"{packages}:{root}"}
    assert "4 passed" in run_suite(tmp_path, "agent.py", "test_agent.py", environ=environ)


@pytest.mark.extended
def test_the_embedded_model_of_the_page_survives(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    assert "1 passed" in run_suite(tmp_path, "test_embedded.py", environ=environ)


def test_the_rules_of_the_page_are_read(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(FILES["rules.yaml"])
    unused = '"look-up" was never used\nthe rule "tell" was never used'
    with ScriptedServer("--rules", str(rules)) as server, pytest.raises(AssertionError, match=unused):
        server.check()
