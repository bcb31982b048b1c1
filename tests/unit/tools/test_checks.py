"""`make check` finds what is wrong with contracts and manifests, and fails where a tool that it needs is missing."""

import sys
from pathlib import Path

import pytest

from tools import check_compose, check_kubernetes, lint_protos


def test_the_contracts_are_linted_and_compared_with_those_of_each_release(capfd: pytest.CaptureFixture[str]) -> None:
    assert lint_protos.main() == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].endswith("files compile")
    assert lines[1] == "buf lint: passed"
    assert "buf breaking --against tests/compat/0.1.0/contracts.binpb.gz: passed" in lines[2:]


def test_without_buf_the_lint_fails_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint_protos, "BUF", tmp_path / "buf")
    assert lint_protos.main() == 1
    assert f"there is no {tmp_path / 'buf'}; `make setup` installs it" in capsys.readouterr().out


def test_the_compose_files_fit_the_specification(capfd: pytest.CaptureFixture[str]) -> None:
    assert check_compose.main([]) == 0
    said = capfd.readouterr().out
    assert (said.count("compose schema: passed"), said.count("docker compose: passed")) == (1, 2)


def test_compose_files_with_an_unknown_or_wrong_field_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {tmp_path / "unknown.yaml": "{image: press, port: 80}", tmp_path / "wrong.yaml": "{restart: [always]}"}
    for file, service in files.items():
        file.write_text(f"services: {{press: {service}}}\n", encoding="utf-8")
    assert check_compose.main([str(file) for file in files]) != 0
    said = capfd.readouterr().out
    assert "compose schema: failed" in said
    assert all(f"{file}::$.services.press" in said for file in files)


def test_docker_compose_refuses_what_its_schema_allows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {press: {image: press, depends_on: [paper]}}\n", encoding="utf-8")
    assert check_compose.main([str(file)]) != 0
    said = capfd.readouterr()
    assert "compose schema: passed" in said.out
    assert "docker compose: failed" in said.out
    assert "paper" in said.err


def test_without_the_checker_of_compose_files_the_check_fails_and_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_compose, "find_spec", lambda name: None)
    assert check_compose.main([]) == 1
    assert "check-jsonschema is not installed; `make setup` installs it" in capsys.readouterr().out


def test_the_chart_and_what_it_makes_are_checked(capfd: pytest.CaptureFixture[str]) -> None:
    assert check_kubernetes.main([]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "default.yaml: 10 documents"
    # Their definitions come with no package.
    assert lines[-1].startswith("not checked against a schema (--crds): Certificate, HTTPRoute, InferencePool")


def test_without_the_schemas_the_check_fails_and_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    assert check_kubernetes.main([]) == 1
    assert "kubernetes_validate is not installed; `make setup` installs" in capsys.readouterr().out
