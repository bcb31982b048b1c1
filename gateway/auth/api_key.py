"""API keys: how they are made, what is kept of them, how a call shows one.

A key is 32 random bytes, so there is nothing to guess and no dictionary to try: one SHA-256 keeps it as safe as a slow
hash would, and costs a call a microsecond. A key is found by looking its hash up. How long that takes tells about the
hash, and nothing that is known of a hash brings its key nearer.
"""

import re
import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import NewType

from quire.rpc.errors import Unauthenticated

KeyHash = NewType("KeyHash", bytes)

_PREFIX = "quire-"
_RANDOM_BYTES = 32
_SHOWN = re.compile(r"bearer +([\x21-\x7e]{1,512})", re.IGNORECASE)


def make_key() -> str:
    """A new key, different from all others."""
    return _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)


def hash_of(key: str) -> KeyHash:
    """What is kept of a key."""
    return KeyHash(sha256(key.encode()).digest())


def shown_key(authorizations: Sequence[str | bytes]) -> str:
    """The key in a call's authorization headers.

    Raises:
        Unauthenticated: there is none, or there are several, or it is not of the form "Bearer KEY".
    """
    if not authorizations:
        raise Unauthenticated(
            "no API key; send it as authorization: Bearer KEY",
            reason="MISSING_API_KEY",
        )
    text = authorizations[0]
    match = _SHOWN.fullmatch(text.decode("latin-1") if isinstance(text, bytes) else text)
    if match is None or len(authorizations) > 1:
        raise Unauthenticated(
            "the authorization is not of the form Bearer KEY, or there are several", reason="INVALID_API_KEY"
        )
    return match[1]
