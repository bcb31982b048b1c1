"""`make check` finds what is wrong with compose files, and fails where a tool that it needs is missing."""

import sys
from pathlib import Path

import pytest

from tools import check_compose, check_kubernetes, lint_protos


def test_a_compose_file_that_is_wrong_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {press: {image: press, port: 80}}\n", encoding="utf-8")
    assert check_compose.main([str(file)]) != 0
    assert "compose schema: failed" in capfd.readouterr().out
    # Allowed by the schema, and refused by docker compose.
    file.write_text("services: {press: {image: press, depends_on: [paper]}}\n", encoding="utf-8")
    assert check_compose.main([str(file)]) != 0
    said = capfd.readouterr().out
    assert "compose schema: passed" in said
    assert "docker compose: failed" in said


def test_without_what_it_needs_a_check_fails_and_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint_protos, "BUF", tmp_path / "buf")
    monkeypatch.setattr(check_compose, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    for check in (lint_protos.main, lambda: check_compose.main([]), lambda: check_kubernetes.main([])):
        assert check() == 1
        assert "`make setup` installs" in capsys.readouterr().out
