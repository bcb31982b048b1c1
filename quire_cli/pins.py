"""`quire pin` and `quire unpin`: a prefix that stays cached for a while."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from quire.client import ChatMessage, Client
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire_cli.flags import ConnectionFlags, ModelFlags, read_text


@dataclass(frozen=True, slots=True)
class PinFlags(ModelFlags):
    """Keeps the start of prompts cached: the argument, the text of --file, or all of stdin. Prints the pin's id
    first."""

    prefix: str | None = setting(None, "the prefix; without it and without --file, all of stdin", positional=True)
    file: str | None = setting(
        None, "file whose text is the prefix; - is stdin", variable="QUIRE_PIN_FILE", metavar="FILE"
    )
    # Not QUIRE_SYSTEM, which is a message to `quire chat`.
    system: bool = setting(
        False, "the prefix is the system message at the start of conversations", variable="QUIRE_PIN_SYSTEM"
    )
    time_to_live: float | None = setting(
        None,
        "how long to keep it; by default as long as the server decides",
        minimum=0.001,
        maximum=86_400,
        metavar="SECONDS",
    )
    format: str = setting("text", "how to print", choices=("text", "json"))


@dataclass(frozen=True, slots=True)
class UnpinFlags(ConnectionFlags):
    """Unpins a prefix; its blocks stay cached until others need them."""

    pin_id: str | None = setting(None, "the id that `quire pin` printed", positional=True)


def pin(argv: Sequence[str]) -> int:
    """Prints the pin; 0 when the prefix is pinned."""
    flags = load_settings(PinFlags, argv, os.environ, program="quire pin")
    if flags.prefix is not None and flags.file is not None:
        raise ConfigurationError("give a prefix or --file, not both")
    text = read_text(flags.file or "-").removesuffix("\n") if flags.prefix is None else flags.prefix
    if not text:
        raise ConfigurationError("the prefix is empty; give one as argument, by --file or on stdin")
    prefix = [ChatMessage("system", text)] if flags.system else text
    time_to_live_ms = None if flags.time_to_live is None else round(flags.time_to_live * 1000)
    with Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        made = client.pin_prefix(prefix, time_to_live_ms=time_to_live_ms, model=flags.model)
    if flags.format == "json":
        print(json.dumps(dataclasses.asdict(made)))
    else:
        print(f"{made.pin_id} {made.pinned_tokens} tokens for {made.time_to_live_ms / 1000:g} s")
    return 0


def unpin(argv: Sequence[str]) -> int:
    """0 when the pin is ended."""
    flags = load_settings(UnpinFlags, argv, os.environ, program="quire unpin")
    if not flags.pin_id:
        raise ConfigurationError("give the id of a pin, which `quire pin` prints")
    with Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        client.unpin_prefix(flags.pin_id)
    return 0
