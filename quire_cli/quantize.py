"""`quire quantize`: a model as a GGUF file with fewer bits a weight."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.model_files.model_source import resolve_model
from quire.model_files.progress import ProgressLine, of_bytes
from quire.runtime.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire quantize"


@dataclass(frozen=True, slots=True)
class QuantizeFlags:
    """Writes a model as a GGUF file, which Quire and llama.cpp serve. docs/quantization.md compares the formats."""

    model: str | None = setting(None, "the model: a directory, a GGUF file, or ORG/NAME", positional=True)
    out: Path | None = setting(None, "the file to write, which must not exist: NAME.gguf", positional=True)
    format: str = setting(
        "Q4_K_M", "types of the weights by llama.cpp's names, such as Q4_K_M, Q5_K_M, Q6_K, Q8_0, IQ4_XS, BF16"
    )


def main(argv: Sequence[str]) -> int:
    """Prints the path of the file."""
    flags = load_settings(QuantizeFlags, argv, os.environ, program=PROGRAM)
    if flags.model is None or flags.out is None:
        raise ConfigurationError("call it as quire quantize MODEL OUT.gguf --format Q4_K_M (--help lists all flags)")
    # torch comes with it, which `quire --help` must not wait for.
    from worker_svc.gguf_writer import FORMATS, write_gguf

    format = flags.format.upper()
    if format not in FORMATS:
        raise ConfigurationError(f'--format is "{flags.format}"; formats are {", ".join(FORMATS)}')
    if flags.out.suffix != ".gguf" or flags.out.exists():
        problem = "exists; remove it first" if flags.out.exists() else "does not end in .gguf"
        raise ConfigurationError(f"the file {flags.out} {problem}")
    line = ProgressLine()
    try:
        write_gguf(
            resolve_model(flags.model),
            flags.out,
            format,
            lambda *sizes: line.show("{} of {}".format(*of_bytes(*sizes))),
        )
    finally:
        line.clear()
    print(flags.out)
    return 0
