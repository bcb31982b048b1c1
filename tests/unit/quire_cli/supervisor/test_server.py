import errno
import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from quire.runtime.settings import ConfigurationError
from quire_cli.supervisor.server import RunDirectory


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of the directories, with a path that is short enough for sockets."""
    directory = tmp_path_factory.mktemp("t")
    assert len(os.fsencode(directory)) <= 60
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_a_directory_is_private_and_goes_with_all_that_lies_in_it(temporary: Path) -> None:
    directory = RunDirectory.make()
    assert directory.path.parent == temporary
    # Because of its lock, systemd-tmpfiles, which removes old files, skips the files in it.
    cleaner = os.open(directory.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(cleaner)
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


def test_where_no_directory_can_be_made_the_way_out_is_named_and_nothing_stays(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def has_none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/']")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", is_full)
        with pytest.raises(ConfigurationError, match=f"made in {temporary}: No space left .*; set TMPDIR"):
            RunDirectory.make()
    assert list(temporary.iterdir()) == []
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "none"))
    with pytest.raises(ConfigurationError, match=f"made in {temporary}/none: No such file or directory; set TMPDIR"):
        RunDirectory.make()
    monkeypatch.setattr(tempfile, "gettempdir", has_none)
    with pytest.raises(ConfigurationError, match=r"No usable temporary directory .*; set TMPDIR"):
        RunDirectory.make()
