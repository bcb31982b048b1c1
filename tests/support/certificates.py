"""Directories of certificates for tests, as `quire certs` makes them."""

import datetime as dt
from pathlib import Path

from quire.rpc.certificates import Authority
from quire.rpc.tls import AUTHORITY_FILE, Role
from quire_cli.certs import LOCAL_HOSTS


def make_certificates(directory: Path, *, authority: Authority | None = None, age_days: int = 0) -> Authority:
    """Certificates of all roles that are good for a day, made `age_days` ago; by a new authority, or by this one."""
    directory.mkdir(exist_ok=True)
    made_at = dt.datetime.now(dt.UTC) - dt.timedelta(days=age_days)
    authority = authority or Authority.make(365, made_at)
    # An authority that is written beside another one is trusted besides it.
    (directory / AUTHORITY_FILE).unlink(missing_ok=True)
    authority.write(directory)
    for role in Role:
        authority.issue(directory, role, LOCAL_HOSTS, 1, made_at)
    return authority
