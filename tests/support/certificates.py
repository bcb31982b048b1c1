"""Directories of certificates for tests, as `quire certs` makes them."""

import datetime as dt
from pathlib import Path

from quire.rpc.certificates import Authority
from quire.rpc.tls import AUTHORITY_FILE, Role
from quire_cli.certs import LOCAL_HOSTS


def make_certificates(directory: Path) -> Authority:
    """Certificates of all roles that are valid for a day, by a new authority."""
    directory.mkdir(exist_ok=True)
    made_at = dt.datetime.now(dt.UTC)
    authority = Authority.make(365, made_at)
    # A new authority in a folder that has one is trusted in addition to it.
    (directory / AUTHORITY_FILE).unlink(missing_ok=True)
    authority.write(directory)
    for role in Role:
        authority.issue(directory, role, LOCAL_HOSTS, 1, made_at)
    return authority
