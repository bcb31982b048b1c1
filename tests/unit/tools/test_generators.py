"""What tools write is current, or they say so."""

from pathlib import Path
from types import ModuleType

import pytest

from tools import generate_api_docs, generate_sync_client

SHELF = """
syntax = "proto3";
package quire.shelf.v1;
// Keeps books. Every method may answer
//   NOT_FOUND   no such shelf
// Try again later.
service ShelfService {
  rpc Watch(stream WatchRequest) returns (stream WatchResponse);
}
message WatchRequest {
  // Exactly one.
  oneof shelf {
    string name = 1;
    WatchResponse number = 2;
  }
  // Where | is 2 * 3 or <s>, but `a * b` stays,
  // on two lines.
  optional uint32 since = 3;
  map<uint32, WatchResponse> by_floor = 5;
}
message WatchResponse {}
"""


def make_repository(root: Path) -> Path:
    (root / "protos").mkdir()
    (root / "protos" / "shelf.proto").write_text(SHELF, encoding="utf-8")
    (root / "docs").mkdir()
    (root / "docs" / "api_head.md").write_text("# Head\n", encoding="utf-8")
    return root


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


def test_comments_of_contracts_read_as_they_were_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate_api_docs, "ROOT", make_repository(tmp_path))
    monkeypatch.setattr(generate_api_docs, "API_DOCS", tmp_path / "api.md")
    assert generate_api_docs.main([]) == 0
    page = (tmp_path / "api.md").read_text(encoding="utf-8")
    assert page.startswith(f"{generate_api_docs.NOTICE}\n\n# Head\n")
    assert "may answer\n\n```text\nNOT_FOUND   no such shelf\n```\n\nTry again later.\n" in page
    assert "- `since` (3, optional uint32): Where | is 2 \\* 3 or &lt;s>, but `a * b` stays, on two lines.\n" in page
    assert "- `number` (2, [WatchResponse](#quire.shelf.v1.WatchResponse), one of `shelf`)\n" in page
    assert "- `by_floor` (5, map of uint32 to [WatchResponse](#quire.shelf.v1.WatchResponse))\n" in page
    assert "`shelf`: Exactly one." in page
    assert "### message WatchResponse\n\nNo fields." in page
