"""Tables of tokens on disk, so that the next start need not read tokenizer.json, which may have 33 MB of JSON.

They are in `quire/vocabularies` in the folder of the hub's cache (HF_HOME), one file for each content of
tokenizer.json and tokenizer_config.json. A file that is damaged, or that cannot be read or written, is as good as none.
"""

import hashlib
import json
import logging
import os
import struct
import tempfile
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
from huggingface_hub import constants

from quire.constraints.tokens import TokenTable
from quire.model_directory import ModelDirectory

MAX_FILES, MAX_BYTES = 32, 256 << 20
"""Of all tables. The least recently used ones are removed."""
MIN_TOKENIZER_BYTES = 1 << 20
"""The table of a smaller tokenizer.json is made as fast as it is read."""
_FORMAT = b"quire tokens 1"
# The length of a description in JSON, which follows with the lengths of all tokens, as 32-bit numbers, and their bytes.
_HEADER = struct.Struct("<Q")
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
    except (OSError, ValueError, KeyError, struct.error) as error:
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
    (size,) = _HEADER.unpack_from(body)
    described = json.loads(body[_HEADER.size : _HEADER.size + size])
    at = _HEADER.size + size
    lengths = np.frombuffer(body, "<u4", described["tokens"], at).tolist()
    ends = accumulate(lengths, initial=at + 4 * len(lengths))
    with suppress(OSError):
        os.utime(file)
    return TokenTable([body[start:end] for start, end in pairwise(ends)], described["special"], described["text"])


def _write(file: Path, table: TokenTable) -> None:
    described = {"tokens": len(table.token_bytes), "special": table.special_tokens, "text": table.text_tokens}
    description = json.dumps(described).encode()
    lengths = np.array([len(each) for each in table.token_bytes], "<u4").tobytes()
    body = b"".join((_HEADER.pack(len(description)), description, lengths, *table.token_bytes))
    file.parent.mkdir(parents=True, exist_ok=True)
    part, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(part, "wb") as opened:
            # Other users may read it, as the files of the hub.
            os.fchmod(part, 0o644)
            opened.write(_digest(body) + body)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
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
