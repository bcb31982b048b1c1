"""`quire log-level`: changes the log level of running services, at their admin ports."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.client import QuireError
from quire.rpc.admin_servicer import MAX_DURATION_MS, set_log_level
from quire.rpc.tls import Role, TlsIdentity
from quire.runtime.logs import LOG_LEVELS
from quire.runtime.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire log-level"
CONFIGURED = "configured"


@dataclass(frozen=True, slots=True)
class LogLevelFlags:
    """Changes the log level of running services, until they are restarted or the time is over."""

    level: str | None = setting(
        None,
        f"the level; {CONFIGURED} is the one that the service was started with",
        positional=True,
        choices=(*LOG_LEVELS, CONFIGURED),
        variable="QUIRE_NEW_LOG_LEVEL",
    )
    admin: tuple[str, ...] = setting(
        (),
        "addresses of --admin-port of the services, with commas",
        metavar="HOST:PORT",
        variable="QUIRE_ADMIN_ADDRESS",
    )
    seconds: float = setting(
        0.0,
        "seconds after which the level is as configured again; 0 is no limit",
        minimum=0,
        maximum=MAX_DURATION_MS / 1000,
        metavar="SECONDS",
        variable="QUIRE_LOG_LEVEL_SECONDS",
    )
    tls_dir: Path | None = setting(
        None, "directory with ca.pem, operator.pem and operator.key, where services use TLS", metavar="DIR"
    )
    timeout: float = setting(5.0, "seconds to wait for an answer", minimum=0.1, metavar="SECONDS")


def main(argv: Sequence[str]) -> int:
    """Prints the level of each service; returns 0 if all have it."""
    flags = load_settings(LogLevelFlags, argv, os.environ, program=PROGRAM)
    if flags.level is None:
        raise ConfigurationError(f"give a level: {', '.join((*LOG_LEVELS, CONFIGURED))}")
    if not flags.admin:
        raise ConfigurationError("give --admin HOST:PORT, the address of --admin-port of a service")
    tls = None if flags.tls_dir is None else TlsIdentity.of(flags.tls_dir, Role.OPERATOR)
    level = None if flags.level == CONFIGURED else flags.level
    failed = False
    for address in flags.admin:
        try:
            now, configured = set_log_level(address, level, duration_s=flags.seconds, tls=tls, timeout_s=flags.timeout)
        except QuireError as error:
            failed = True
            print(f"{PROGRAM}: error: {address}: {' '.join(error.message.split())}", file=sys.stderr)
            continue
        until = f" for {flags.seconds:g} s, then {configured}" if flags.seconds else ""
        print(f"{address}: {now}{until}")
    return 1 if failed else 0
