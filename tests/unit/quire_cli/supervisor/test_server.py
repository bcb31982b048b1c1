import os
import tempfile
from pathlib import Path

import pytest

from quire_cli.supervisor.server import RunDirectory


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the directories are made; its path is short enough for that."""
    directory = tmp_path_factory.mktemp("t")
    assert len(os.fsencode(directory)) <= 60
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_directory_is_private_and_goes_with_all_that_lies_in_it(temporary: Path) -> None:
    directory = RunDirectory.make()
    assert directory.path.parent == temporary
    assert directory.path.stat().st_mode & 0o777 == 0o700
    (directory.path / "worker.sock").touch()
    directory.remove()
    directory.remove()
    assert list(temporary.iterdir()) == []


def test_one_that_is_abandoned_goes_and_one_that_is_held_or_somebody_elses_stays(temporary: Path) -> None:
    held, abandoned = RunDirectory.make(), temporary / "quire-abandoned"
    abandoned.mkdir()
    (abandoned / "lock").touch()
    (temporary / "quire-notes").mkdir()
    (temporary / "quire-notes" / "text").touch()
    (temporary / "quire-file").touch()
    new = RunDirectory.make()
    others = [temporary / "quire-notes", temporary / "quire-file"]
    assert sorted(temporary.iterdir()) == sorted([held.path, new.path, *others])
    held.remove()
    new.remove()
    assert sorted(temporary.iterdir()) == sorted(others)


def test_a_long_temporary_directory_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    directory = RunDirectory.make()
    assert directory.path.parent == Path("/tmp")
    directory.remove()
