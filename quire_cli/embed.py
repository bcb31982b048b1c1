"""`quire embed`: the vectors of texts, as lines of JSON or as a NumPy array."""

import asyncio
import errno
import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TextIO

from quire.client import AsyncClient, Embeddings, QuireError, RetryPolicy
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire_cli.flags import ModelFlags, read_lines

PROGRAM = "quire embed"
_CONCURRENT_CALLS = 4
_POSITION = re.compile(r"\btexts\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class EmbedFlags(ModelFlags):
    """Prints the vectors of texts: the arguments, the lines of --file, or the lines of stdin."""

    texts: tuple[str, ...] = setting(
        (), "the texts; without them and without --file, the lines of stdin", positional=True
    )
    file: str | None = setting(None, "texts, one per line; - is stdin", metavar="FILE")
    output: str = setting(
        "-",
        "where the vectors go: a file whose name ends in .npy gets an array of float32, [texts, size]; another file or "
        "stdout (-) gets lines of JSON with text and embedding",
        metavar="FILE",
    )
    prompt_name: str | None = setting(None, "prompt of the model that is put before each text", metavar="NAME")
    dimensions: int | None = setting(None, "only the first numbers of each vector, scaled to the length 1", minimum=1)
    truncate: bool = setting(False, "cut texts that are too long instead of refusing them")
    batch_size: int = setting(128, "texts of one call; several calls run at once", minimum=1, maximum=2048)


def main(argv: Sequence[str]) -> int:
    """Writes the vectors; returns 0."""
    flags = load_settings(EmbedFlags, argv, os.environ, program=PROGRAM)
    if flags.texts and flags.file is not None:
        raise ConfigurationError("give texts or --file, not both")
    texts = flags.texts or read_lines(flags.file or "-")
    if flags.output == "-":
        asyncio.run(_embed(texts, flags, partial(_print_line, sys.stdout)))
        return 0
    try:
        if not flags.output.endswith(".npy"):
            with Path(flags.output).open("w", encoding="utf-8") as lines:
                asyncio.run(_embed(texts, flags, partial(_print_line, lines)))
            return 0
        with Path(flags.output).open("wb") as file:
            # Only here: the other commands start without it.
            import numpy as np

            vectors: list[array[float]] = []
            asyncio.run(_embed(texts, flags, lambda text, vector: vectors.append(vector)))
            np.save(file, np.array(vectors, np.float32))
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise ConfigurationError(f"--output {flags.output} cannot be written: {error.strerror}") from error
    return 0


def _print_line(file: TextIO, text: str, vector: "array[float]") -> None:
    print(json.dumps({"text": text, "embedding": vector.tolist()}, ensure_ascii=False), file=file, flush=True)


async def _embed(texts: Sequence[str], flags: EmbedFlags, write: Callable[[str, "array[float]"], object]) -> None:
    """Writes each text with its vector, in order. Raises QuireError, with positions among all texts."""
    # A full queue empties, so the command waits as long as that takes.
    retry = RetryPolicy(attempts=None)
    slots = asyncio.Semaphore(_CONCURRENT_CALLS)
    async with AsyncClient(flags.address, api_key=flags.api_key, tls=flags.client_tls(), retry=retry) as client:

        async def call(begin: int) -> Embeddings:
            async with slots:
                return await client.embed(
                    texts[begin : begin + flags.batch_size],
                    dimensions=flags.dimensions,
                    prompt_name=flags.prompt_name,
                    truncate=flags.truncate or None,
                    model=flags.model,
                )

        begins = range(0, len(texts), flags.batch_size)
        calls = [asyncio.create_task(call(begin)) for begin in begins]
        try:
            for begin, answer in zip(begins, calls, strict=True):
                try:
                    vectors = (await answer).vectors
                except QuireError as error:
                    error.message = _shifted(error.message, begin)
                    raise
                for text, vector in zip(texts[begin : begin + len(vectors)], vectors, strict=True):
                    write(text, vector)
        finally:
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


def _shifted(message: str, begin: int) -> str:
    """A message with positions of a call that begins with the text at `begin`, as positions among all texts."""
    return _POSITION.sub(lambda found: f"texts[{int(found[1]) + begin}]", message)
