"""The programs of `make check` find faults: in compose files, in modules that read clocks by themselves, in generated
files that were edited by hand. A check fails if a tool that it needs is missing."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from tools import (
    check_clocks,
    check_compose,
    check_kubernetes,
    check_words,
    generate_api_docs,
    generate_sync_client,
    lint_protos,
)


def test_a_compose_file_that_is_wrong_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text("services: {press: {image: press, port: 80}}\n", encoding="utf-8")
    assert check_compose.main([str(file)]) != 0
    assert "compose schema: failed" in capfd.readouterr().out
    # The schema allows it, and docker compose refuses it.
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


SOURCE = """
import datetime, os, time as t
from quire.runtime import clock
from secrets import token_hex
def wait(clock=t.monotonic): ...
key, now = os.urandom(8), datetime.datetime.now()
clock.monotonic(), call.time.left_s(), self.timing.time.begin()
"""


def test_clocks_of_its_own_are_found_and_those_of_the_seam_allowed() -> None:
    found = [each.what for each in check_clocks.findings_in(SOURCE, Path("module.py"))]
    assert sorted(found) == ["datetime.datetime.now", "from secrets import token_hex", "os.urandom", "time.monotonic"]


PROSE = {
    "a.md": "# What it is\nThose of `so many` rows, read alone.\n```\nnobody\n```\nWhat is a row?\n",
    "a.py": 'def a(alone):\n    """Of rows."""\n    return "none where", alone  # beside\n',
    "tests/a.py": 'def a():\n    """Of rows."""\n    return "none where"  # who\n',
    "a.proto": "string alone = 1; // As many as.\n// Nobody.\n",
}


def test_words_of_the_dialect_are_found_in_what_people_read_and_not_in_code() -> None:
    found = {
        path: [(each.line, each.words) for each in check_words.findings_in(text, path)] for path, text in PROSE.items()
    }
    assert found == {
        "a.md": [(2, "Those of"), (2, "alone")],
        "a.py": [(2, "Of"), (3, "none where"), (3, "beside")],
        "tests/a.py": [(2, "Of"), (3, "who")],
        "a.proto": [(1, "As many as"), (2, "Nobody")],
    }


def test_a_file_may_have_no_more_words_of_the_dialect_than_the_table_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["check_words"])
    monkeypatch.setattr(check_words, "_tracked", lambda places: ["a.md"])
    Path("tools").mkdir()
    Path("tools/allowed_words.tsv").write_text("a.md\t1\n")
    Path("a.md").write_text("It runs alone.\n")
    assert check_words.main() == 0
    Path("a.md").write_text("It runs alone, beside others.\n")
    assert check_words.main() == 1
    assert "a.md: 2 words of the dialect, at most 1 are allowed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tool", "target"),
    [(generate_api_docs, "API_DOCS"), (generate_sync_client, "TARGET")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_check_refuses_what_was_edited_by_hand(
    tool: ModuleType, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main(["--check"]) == 0
    edited = tmp_path / "edited"
    edited.write_text(getattr(tool, target).read_text(encoding="utf-8") + "edited by hand\n", encoding="utf-8")
    monkeypatch.setattr(tool, target, edited)
    capsys.readouterr()
    assert tool.main(["--check"]) == 1
    assert "run `" in capsys.readouterr().err
