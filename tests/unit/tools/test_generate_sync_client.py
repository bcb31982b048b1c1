"""The blocking client is what the asyncio one makes."""

import pytest

from tools import generate_sync_client as tool


def test_the_blocking_client_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--check"]) == 0, "run `python -m tools.generate_sync_client`"
    assert capsys.readouterr().out == "sync_client.py is current\n"


def test_nothing_of_asyncio_is_left_in_it() -> None:
    text = tool.TARGET.read_text(encoding="utf-8")
    assert "async" not in text.replace("async_client.py", "").lower()
    assert "await" not in text


def test_a_client_that_was_edited_by_hand_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = tmp_path / "sync_client.py"
    edited.write_text(tool.TARGET.read_text(encoding="utf-8") + "\n# by hand\n", encoding="utf-8")
    monkeypatch.setattr(tool, "TARGET", edited)
    assert tool.main(["--check"]) == 1
    assert "run `python -m tools.generate_sync_client`" in capsys.readouterr().err
