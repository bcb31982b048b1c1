"""Tables of tokens on disk, so that the next start need not read tokenizer.json, which may have 33 MB of JSON.

They are in `quire/vocabularies` in the folder of the hub's cache (HF_HOME), one file for each content of
tokenizer.json and tokenizer_config.json. A file that is damaged, or cannot be read or written, counts as missing.
"""

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from quire.constraints.tokens import TokenTable
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.replacement import replace_file

MAX_FILES, MAX_BYTES = 32, 256 << 20
"""The maximum of all tables together. The least recently used ones are removed."""
MIN_TOKENIZER_BYTES = 1 << 20
"""Minimum size of a tokenizer.json whose table is cached: a smaller one's table is made as fast as it is read."""
_FORMAT = b"quire tokens 3"
# JSON follows: the tokens, whose bytes are characters of Latin-1, and the ids of special and other added tokens.
_DIGEST_BYTES = 32
_logger = logging.getLogger(__name__)


def has_large_tables(directory: ModelDirectory) -> bool:
    """Whether it takes a second or more to make the tables of a model's vocabulary."""
    try:
        return directory.gguf is not None or (directory.path / "tokenizer.json").stat().st_size >= MIN_TOKENIZER_BYTES
    except OSError:
        return False


def token_table(directory: ModelDirectory) -> TokenTable:
    """The tokens of a model, from the cache if they are there.

    Raises:
        ConfigurationError: the directory has no tokenizer.
        ValueError: as `TokenTable.of`.
    """
    content = b"" if directory.gguf is not None else directory.tokenizer_json()
    if len(content) < MIN_TOKENIZER_BYTES:
        return TokenTable.of(directory.tokenizer(), directory.tokenizer_config)
    config = json.dumps(directory.tokenizer_config, sort_keys=True).encode()
    key = hashlib.blake2b(b"".join((_FORMAT, hashlib.blake2b(content).digest(), config)), digest_size=20).hexdigest()
    file = Path(constants.HF_HOME) / "quire" / "vocabularies" / key
    try:
        return _read(file)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        _logger.warning("%s is not used, and made again: %s", file, error)
    table = TokenTable.of(json.loads(content), directory.tokenizer_config)
    try:
        _write(file, table)
    except OSError as error:
        _logger.warning("tables of the vocabulary are not kept for the next start: %s", error)
    return table


def _read(file: Path) -> TokenTable:
    content = file.read_bytes()
    digest, body = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if _digest(body) != digest:
        raise ValueError("its checksum does not fit")
    tokens, special, text = json.loads(body)
    with suppress(OSError):
        os.utime(file)
    return TokenTable([each.encode("latin-1") for each in tokens], special, text)


def _write(file: Path, table: TokenTable) -> None:
    tokens = [each.decode("latin-1") for each in table.token_bytes]
    body = json.dumps([tokens, table.special_tokens, table.text_tokens], ensure_ascii=False).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    # Other users may read it, like the files of the hub.
    replace_file(file, _digest(body) + body, 0o644)
    _remove_oldest(file)


def _remove_oldest(newest: Path) -> None:
    """Keeps the newest file and the files that were used last; also removes what a killed process left behind."""
    with suppress(OSError):
        others = [(each.stat(), each) for each in newest.parent.iterdir() if each != newest]
        size = newest.stat().st_size
        for number, (status, each) in enumerate(sorted(others, key=lambda entry: -entry[0].st_mtime_ns), 2):
            size += status.st_size
            if number > MAX_FILES or size > MAX_BYTES:
                each.unlink(missing_ok=True)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(_FORMAT + body, digest_size=_DIGEST_BYTES).digest()
