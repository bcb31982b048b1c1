"""The server tests of vLLM and of llama.cpp, unchanged, against a running Quire.

A child pytest runs them in their unpacked packages, with the plugin `peers/running_quire.py` in place of the fixtures
that start a server. `peers/*.toml` say which files run, with which model, which of their tests end otherwise here and
why, and why the other files do not run. Tests whose names begin with an entry of `left_out` do not run: they need the
network, or end by chance.
"""

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from quire.model_files.model_source import resolve_model
from tests.real.models import real_model
from tests.real.packages import pypi
from tests.support.serving import serving

pytestmark = pytest.mark.real

PEERS = Path(__file__).with_name("peers")
TABLES: dict[str, dict[str, Any]] = {
    path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(PEERS.glob("*.toml"))
}
# The first group takes seconds.
RUNS = [
    pytest.param("llama_cpp", "quire-tiny", marks=pytest.mark.extended),
    ("vllm", "quire-tiny"),
    ("vllm", "qwen3"),
]
_SECONDS = 600


def folder_of(peer: str) -> Path:
    table = TABLES[peer]
    return pypi(table["package"], table["version"], sdist=True) / table["folder"]


def outcomes_of(peer: str, files: list[str], url: str, model: Path, report: Path) -> dict[str, dict[str, str]]:
    """How each test of the files ended, by file and name; for a test that did not pass, the last line of its report."""
    folder = folder_of(peer)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV"))}
    paths = os.pathsep.join(map(str, [PEERS, folder]))
    given = {"QUIRE_PEER": peer, "QUIRE_URL": url, "QUIRE_MODEL": str(model), "QUIRE_REPORT": str(report)}
    plugins = ["running_quire", *TABLES[peer]["plugins"]]
    command = [
        *(sys.executable, "-P", "-m", "pytest", "-q", "--noconftest", "-c", os.devnull, "--rootdir", str(folder)),
        *("-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", "--timeout=120", "--tb=short"),
        *(word for plugin in plugins for word in ("-p", plugin)),
        *(f"--deselect={file}::{name}" for file in files for name in TABLES[peer]["runs"][file].get("left_out", {})),
        *files,
    ]
    environ = inherited | given | {"PYTHONPATH": paths, "DEBUG_EXTERNAL": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environ, check=False, capture_output=True, text=True, timeout=_SECONDS
    )
    # 1: some tests failed, which the table may list.
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, dict[str, str]] = {}
    for line in report.read_text(encoding="utf-8").splitlines():
        file, name, outcome = json.loads(line)
        found.setdefault(file, {})[name] = outcome
    return found


def is_listed(name: str, listed: str) -> bool:
    """Whether an entry is about a test: it is the name of a function, or the beginning of an id with parameters."""
    return name.startswith(listed) if "[" in listed else name.partition("[")[0] == listed


def problems_of(outcomes: dict[str, str], differs: dict[str, str]) -> Iterator[str]:
    """Differences from the table: a test that fails without a reason, and a reason for a test that passes or is not
    there."""
    for name, outcome in outcomes.items():
        if outcome != "passed" and not any(is_listed(name, each) for each in differs):
            yield f"{name}: {outcome}"
    for listed in differs:
        ended = [outcome for name, outcome in outcomes.items() if is_listed(name, listed)]
        if not ended or "passed" in ended:
            yield f"{listed} is listed as a difference, and ended as {ended}"


@pytest.mark.parametrize(("peer", "model"), RUNS)
async def test_the_tests_of_a_peer_pass_but_for_the_listed_differences(peer, model, tmp_path):
    table = TABLES[peer]
    files = {name: run.get("differs", {}) for name, run in table["runs"].items() if run["model"] == model}
    directory = resolve_model(None) if model == "quire-tiny" else real_model(model)
    settings: dict[str, Any] = {} if model == "quire-tiny" else {"model": str(directory), "max_model_len": 2048}
    async with serving(dtype="float32", served_model_aliases=tuple(table["models"]), **settings) as served:
        url = f"http://{served.server.http_address}"
        outcomes = await asyncio.to_thread(outcomes_of, peer, [*files], url, directory, tmp_path / "report")
    assert outcomes.keys() == files.keys()
    problems = [f"{file}: {each}" for file, differs in files.items() for each in problems_of(outcomes[file], differs)]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("peer", TABLES)
def test_each_file_of_a_peer_s_server_tests_runs_or_has_a_reason(peer):
    table, folder = TABLES[peer], folder_of(peer)
    files = [str(path.relative_to(folder)) for root in table["roots"] for path in (folder / root).rglob("test_*.py")]
    assert set(table["runs"]) <= set(files)
    not_run = {file for file in files if any(fnmatchcase(file, pattern) for pattern in table["not_run"])}
    assert not_run.isdisjoint(table["runs"])
    assert sorted(set(files) - set(table["runs"]) - not_run) == []
    assert [pattern for pattern in table["not_run"] if not any(fnmatchcase(file, pattern) for file in files)] == []
