"""`make check` finds what is wrong with compose files, and fails where a tool that it needs is missing."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools import check_compose, check_kubernetes, lint_protos


@pytest.mark.parametrize(
    ("service", "passed", "failed"),
    [
        ("{image: press, port: 80}", "", "compose schema: failed"),
        ("{restart: [always]}", "", "compose schema: failed"),
        ("{image: press, depends_on: [paper]}", "compose schema: passed", "docker compose: failed"),
    ],
    ids=["unknown field", "wrong field", "what its schema allows and docker compose refuses"],
)
def test_a_compose_file_that_is_wrong_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], service: str, passed: str, failed: str
) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(f"services: {{press: {service}}}\n", encoding="utf-8")
    assert check_compose.main([str(file)]) != 0
    said = capfd.readouterr().out
    assert passed in said
    assert failed in said


@pytest.mark.parametrize("tool", [lint_protos, check_compose, check_kubernetes], ids=lambda tool: tool.__name__)
def test_without_what_it_needs_a_check_fails_and_says_how_to_get_it(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lint_protos, "BUF", tmp_path / "buf")
    monkeypatch.setattr(check_compose, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "kubernetes_validate", None)
    assert tool.main(*([] if tool is lint_protos else [[]])) == 1
    assert "`make setup` installs" in capsys.readouterr().out
