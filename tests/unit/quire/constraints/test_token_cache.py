"""Tables of tokens on disk."""

import errno
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants

from quire.constraints import token_cache
from quire.constraints.token_cache import token_table
from quire.constraints.tokens import TokenTable
from quire.model_files.model_directory import ModelDirectory
from tests.support.tokenizers import byte_level, write_model_directory


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where the tables are."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr(token_cache, "MIN_TOKENIZER_BYTES", 1)
    return tmp_path / "hub" / "quire" / "vocabularies"


@pytest.fixture
def directory(tmp_path) -> ModelDirectory:
    return ModelDirectory.open(write_model_directory(tmp_path / "m", byte_level()))


@pytest.fixture
def made(monkeypatch) -> list[object]:
    """One entry for each table that was not found."""
    calls, real = [], TokenTable.of
    monkeypatch.setattr(TokenTable, "of", lambda *given: calls.append(given) or real(*given))
    return calls


def test_a_table_is_made_once_and_read_as_it_was_written(directory, folder, made) -> None:
    first, second = token_table(directory), token_table(directory)
    assert len(made) == 1
    assert first == second == TokenTable.of(directory.tokenizer(), directory.tokenizer_config)
    (file,) = folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o644


def test_other_contents_of_either_file_have_another_table(directory, folder, made) -> None:
    token_table(directory)
    (directory.path / "tokenizer_config.json").write_text(json.dumps({"x_token": "the"}))
    token_table(ModelDirectory.open(directory.path))
    content = json.loads((directory.path / "tokenizer.json").read_text())
    content["added_tokens"][0]["special"] = False
    (directory.path / "tokenizer.json").write_text(json.dumps(content))
    table = token_table(ModelDirectory.open(directory.path))
    assert list(table.text_tokens.values()) == [0]
    assert len(made) == len([*folder.iterdir()]) == 3


def test_a_small_vocabulary_is_not_kept(directory, folder, monkeypatch) -> None:
    monkeypatch.setattr(token_cache, "MIN_TOKENIZER_BYTES", 1 << 20)
    token_table(directory)
    assert not folder.exists()


def damaged(content: bytes) -> list[bytes]:
    return [b"", content[:20], content[:-1], content + b"x", content[:100] + b"!" + content[101:], bytes(len(content))]


@pytest.mark.parametrize("way", range(6))
def test_a_damaged_file_is_made_again_with_one_line_in_the_log(directory, folder, made, caplog, way) -> None:
    whole = token_table(directory)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(damaged(content)[way])
    assert token_table(directory) == whole
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} is not used, and made again: its checksum does not fit"
    ]
    assert file.read_bytes() == content
    assert len(made) == 2


@pytest.mark.parametrize("reason", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_cannot_be_written_costs_one_line_in_the_log(
    directory, folder, monkeypatch, caplog, reason
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "fdopen" if reason == errno.ENOSPC else "mkdir", refuse)
    with caplog.at_level(logging.INFO):
        assert token_table(directory) == TokenTable.of(directory.tokenizer(), directory.tokenizer_config)
    assert len(caplog.records) == 1
    assert os.strerror(reason) in caplog.text
    assert not folder.exists() or not [*folder.iterdir()]


def test_several_writers_at_once_leave_one_whole_file(directory, folder) -> None:
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(token_table, [directory] * 16))
    assert all(table == tables[0] for table in tables)
    (file,) = folder.iterdir()
    assert token_cache._read(file) == tables[0]


def test_the_files_that_were_used_last_are_kept(directory, folder, monkeypatch) -> None:
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"f{number}").write_bytes(b"x" * 100)
        os.utime(folder / f"f{number}", ns=(number, number))
    monkeypatch.setattr(token_cache, "MAX_FILES", 3)
    token_table(directory)
    assert {"f2", "f3"} < {file.name for file in folder.iterdir()}
    assert len([*folder.iterdir()]) == 3
    (own,) = {file for file in folder.iterdir() if not file.name.startswith("f")}
    os.utime(own, ns=(1, 1))
    # The one that is read counts as used.
    token_table(directory)
    monkeypatch.setattr(token_cache, "MAX_BYTES", 2 * own.stat().st_size + 90)
    (directory.path / "tokenizer_config.json").write_text('{"x_token": "the"}')
    token_table(ModelDirectory.open(directory.path))
    assert own in [*folder.iterdir()]
    assert len([*folder.iterdir()]) == 2
