"""`quire doctor`: a line for each part, its verdict, and what to do."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.runtime.finding import Finding, Verdict
from quire_cli import doctor
from quire_cli.doctor import DoctorFlags, examine
from quire_cli.main import main


@pytest.fixture(autouse=True)
def worker_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading torch is left to the worker's own tests."""
    monkeypatch.setattr("worker_svc.examination.examine_device", lambda: iter([Finding("torch", Verdict.OK, "9.9")]))


def find(part: str, **flags: Any) -> Finding:
    (finding,) = [each for each in examine(replace(DoctorFlags(), **flags)) if each.part == part]
    return finding


def test_every_part_has_a_line_and_the_status_is_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    parts = {line[1] for line in lines if line[0] in set(Verdict)}
    assert {"quire", "processors", "memory", "sockets", "gateway", "scheduler", "worker", "torch", "model"} <= parts


def test_a_model_that_is_not_there_is_wrong_and_the_status_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model=/nowhere", "--format=json"]) == 1
    *_, last = json.loads(capsys.readouterr().out)
    assert (last["part"], last["verdict"]) == ("model", "wrong")
    assert "/nowhere does not exist" in last["found"]
    assert last["advice"]


def test_a_port_that_is_taken_is_named_with_the_flag_that_takes_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = find("HTTP port", http_port=taken.getsockname()[1])
    assert finding.verdict is Verdict.NOTE
    assert "--http-port" in finding.advice


def test_a_service_without_its_packages_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module}", name="starlette")

    monkeypatch.setattr(doctor.importlib, "import_module", refuse)
    finding = find("gateway")
    assert (finding.verdict, finding.found) == (Verdict.NOTE, "starlette is not installed; install quire-llm[gateway]")


def test_a_cache_that_cannot_be_written_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    finding = find("model cache")
    assert finding.found.startswith(f"{tmp_path}/not/yet, ")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: path != tmp_path)
    finding = find("model cache")
    assert (finding.verdict, finding.found) == (Verdict.NOTE, f"{tmp_path}/not/yet cannot be written")
    assert "HF_HOME" in finding.advice


def test_a_model_of_the_hub_is_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    finding = doctor._model("org/name")
    assert (finding.verdict, finding.advice) == (Verdict.NOTE, "`quire pull org/name` downloads it")
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(doctor.resolve_model(None))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    finding = doctor._model("org/name")
    assert finding.verdict is Verdict.OK
    assert finding.found.startswith(f"{snapshot}, LlamaForCausalLM, ")


def test_a_directory_too_long_for_sockets_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(doctor.tempfile, "tempdir", str(deep))
    finding = find("sockets")
    assert finding.verdict is Verdict.WRONG
    assert "TMPDIR" in finding.advice


def test_colours_are_for_terminals_where_no_color_is_not_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda flags: iter([Finding("part", Verdict.OK, "found")]))
    for is_terminal, variable, colours in ((True, "", 1), (True, "1", 0), (False, "", 0)):
        monkeypatch.setenv("NO_COLOR", variable)
        monkeypatch.setattr(doctor.sys.stdout, "isatty", lambda is_terminal=is_terminal: is_terminal)
        assert main(["doctor"]) == 0
        assert capsys.readouterr().out.count("\033[32m") == colours
