"""`quire pin`: a prefix that stays cached for a while."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass

from quire.cli.flags import ModelFlags
from quire.cli.reading import read_text
from quire.client import ChatMessage, Client, PinnedPrefix
from quire.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire pin"


@dataclass(frozen=True, slots=True)
class PinFlags(ModelFlags):
    """Keeps the start of prompts cached: the argument, or all of stdin. Prints the pin's id first."""

    prefix: str | None = setting(None, "the prefix; without it all of stdin", positional=True)
    # Not QUIRE_SYSTEM, which is a message to `quire chat`.
    system: bool = setting(False, "it is the system message at the start of conversations", variable="QUIRE_PIN_SYSTEM")
    time_to_live: float | None = setting(
        None, "how long to keep it; none is the server's default", minimum=0.001, maximum=86_400, metavar="SECONDS"
    )
    format: str = setting("text", "how to print", choices=("text", "json"))


def main(argv: Sequence[str]) -> int:
    """Prints the pin; 0 when the prefix is pinned."""
    flags = load_settings(PinFlags, argv, os.environ, program=PROGRAM)
    text = read_text("-").removesuffix("\n") if flags.prefix is None else flags.prefix
    if not text:
        raise ConfigurationError("the prefix is empty; give one as argument or on stdin")
    prefix = [ChatMessage("system", text)] if flags.system else text
    time_to_live_ms = None if flags.time_to_live is None else round(flags.time_to_live * 1000)
    with Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        pin = client.pin_prefix(prefix, time_to_live_ms=time_to_live_ms, model=flags.model)
    print(json.dumps(dataclasses.asdict(pin)) if flags.format == "json" else _line(pin))
    return 0


def _line(pin: PinnedPrefix) -> str:
    return f"{pin.pin_id} {pin.pinned_tokens} tokens for {pin.time_to_live_ms / 1000:g} s"
