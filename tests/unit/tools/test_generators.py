"""What tools write is current, or they say so."""

from pathlib import Path
from types import ModuleType

import pytest

from tools import generate_api_docs, generate_sync_client


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
