"""`quire unpin`: lets go of a pinned prefix."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from quire.cli.flags import ConnectionFlags
from quire.client import Client
from quire.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire unpin"


@dataclass(frozen=True, slots=True)
class UnpinFlags(ConnectionFlags):
    """Lets go of a pinned prefix; its blocks stay cached until others need them."""

    pin_id: str | None = setting(None, "the id that `quire pin` printed", positional=True)


def main(argv: Sequence[str]) -> int:
    """0 when the pin is ended."""
    flags = load_settings(UnpinFlags, argv, os.environ, program=PROGRAM)
    if not flags.pin_id:
        raise ConfigurationError("give the id of a pin, which `quire pin` prints")
    with Client(flags.address, api_key=flags.api_key, tls=flags.client_tls()) as client:
        client.unpin_prefix(flags.pin_id)
    return 0
