"""A machine without node or docker can still run `make check`, and is told what was not checked."""

from pathlib import Path

import pytest

from tools import check_compose, lint_protos


def test_without_npx_the_protos_are_compiled_and_the_missing_lint_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint_protos, "find_npx", lambda: None)

    assert lint_protos.main() == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("files compile")
    assert lines[1].startswith("buf lint: NOT RUN")


def test_an_npx_that_delivers_nothing_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_protos, "find_npx", lambda: [str(tmp_path / "npx")])
    assert lint_protos.buf_command() is None

    monkeypatch.setattr(lint_protos, "find_npx", lambda: ["false"])
    assert lint_protos.buf_command() is None


def test_npx_of_the_installed_node_is_found_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lint_protos.shutil, "which", lambda name: None)

    npx = lint_protos.find_npx()

    assert npx is not None
    assert all(Path(part).is_file() for part in npx)


def test_without_docker_compose_is_parsed_as_yaml_and_the_missing_check_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_compose, "compose_command", lambda: None)
    file = tmp_path / "compose.yaml"
    file.write_text("services: {press: {image: press}}\n", encoding="utf-8")

    assert check_compose.main([str(file)]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "compose.yaml: 1 services: press",
        "compose config: NOT RUN, since this machine has neither docker compose nor docker-compose",
    ]
