"""`quire certs`: certificates for all services, from a private authority."""

import datetime as dt
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quire.rpc.certificates import Authority, has_authority, hosts_of, share_authority
from quire.rpc.tls import Role
from quire.runtime.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire certs"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class CertsFlags:
    """Makes ca.pem, and for each role ROLE.pem and ROLE.key, in a directory. Called again, it renews all but the
    authority, for the same hosts unless --host names others, and in the same directories. Running services read the new
    files at the next handshake."""

    tls_dir: Path = setting(Path("certs"), "directory of the files", metavar="DIR")
    by_role: bool = setting(
        False, "give each role a separate directory, DIR/ROLE, with its two files and ca.pem, for its container"
    )
    host: tuple[str, ...] = setting(
        (),
        "name or address of a service, in addition to localhost; with commas; by default the hosts of the certificate "
        "that is renewed",
        metavar="HOST",
    )
    days: int = setting(365, "days for which the certificates are valid", minimum=1, maximum=36500)
    authority_days: int = setting(3650, "days for which a new authority is valid", minimum=1, maximum=36500)
    renew_authority: bool = setting(
        False,
        "make a new authority, which ca.pem trusts in addition to earlier ones, and renew nothing else: the next call "
        "does, once every process has this ca.pem",
    )


def main(argv: Sequence[str]) -> int:
    """Makes or renews the files. ConfigurationError if the directory cannot be used."""
    flags = load_settings(CertsFlags, argv, os.environ, program=PROGRAM)
    now = dt.datetime.now(dt.UTC)
    directory = flags.tls_dir
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = Authority.open(directory) if has_authority(directory) else None
        if before is None or flags.renew_authority:
            authority = Authority.make(flags.authority_days, now)
            authority.write(directory)
            print(f"{directory}: a new authority; keep ca.key away from the services")
        else:
            authority = before
        targets = {role: _directory_of(role, flags) for role in Role}
        if before is not None and flags.renew_authority:
            print("certificates are as before: give ca.pem to every process, then call this without --renew-authority")
            return 0
        if authority.not_valid_after < now + dt.timedelta(days=flags.days):
            print(f"{directory}: the authority ends on {authority.not_valid_after:%Y-%m-%d}; see --renew-authority")
        for role, target in targets.items():
            hosts = flags.host or hosts_of(target / f"{role}.pem")
            certificate = authority.issue(target, role, tuple(dict.fromkeys((*LOCAL_HOSTS, *hosts))), flags.days, now)
            print(f"{target / f'{role}.pem'}: valid until {certificate.not_valid_after_utc:%Y-%m-%d}")
    except OSError as error:
        if error.filename is None:
            # An error of stdout.
            raise
        raise ConfigurationError(f"{directory} cannot be used: {error}") from error
    return 0


def _directory_of(role: Role, flags: CertsFlags) -> Path:
    """The directory of the role's files."""
    if not flags.by_role and not (flags.tls_dir / role / f"{role}.pem").exists():
        return flags.tls_dir
    share_authority(flags.tls_dir, flags.tls_dir / role)
    return flags.tls_dir / role
