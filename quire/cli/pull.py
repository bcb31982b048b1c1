"""`quire pull`: a model of a hub into the cache, before it is served or without a server."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.model_directory import HubName
from quire.progress import LoadProgress, ProgressLine
from quire.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire pull"


@dataclass(frozen=True, slots=True)
class PullFlags:
    """Downloads a model of the Hugging Face Hub into its cache, where --model ORG/NAME finds it, offline too. A
    download that broke goes on where it ended. HF_HOME names the cache, HF_ENDPOINT the hub, HF_TOKEN the account."""

    model: str | None = setting(
        None,
        "ORG/NAME or ORG/NAME@REVISION, a branch, tag or commit; ORG/NAME/FILE.gguf is one GGUF file",
        positional=True,
    )
    weights: bool = setting(True, "with the weights; a gateway needs the rest alone", variable="QUIRE_PULL_WEIGHTS")


def main(argv: Sequence[str]) -> int:
    """Prints the path of the model in the cache."""
    flags = load_settings(PullFlags, argv, os.environ, program=PROGRAM)
    if flags.model is None:
        raise ConfigurationError("no model is given; call it as quire pull ORG/NAME (--help lists all flags)")
    name = HubName.parse(flags.model)
    if name is None:
        raise ConfigurationError(f'"{flags.model}" is not valid: expected ORG/NAME, ORG/NAME@REVISION or a file of it')
    print(fetch(name, with_weights=flags.weights), flush=True)
    return 0


def fetch(name: HubName, *, with_weights: bool = True) -> Path:
    """The model in the cache, with the progress of a download on stderr. ConfigurationError as of `quire.hub.pull`."""
    from quire.hub import Parts, pull

    line = ProgressLine()
    began: list[tuple[float, int]] = []

    def show(progress: LoadProgress) -> None:
        now = time.monotonic()
        began_at, bytes_before = began[0] if began else (now, progress.done_bytes)
        began[:] = [(began_at, bytes_before)]
        rate = (progress.done_bytes - bytes_before) / (now - began_at) if now > began_at else 0.0
        text = f"quire: {name}: {progress}"
        if rate:
            left_s = (progress.total_bytes - progress.done_bytes) / rate
            text += f", {rate / 2**20:.1f} MiB/s, {left_s:.0f} s left"
        line.show(text)

    try:
        return pull(name, Parts.ALL if with_weights else Parts.WITHOUT_WEIGHTS, show)
    finally:
        line.clear()
