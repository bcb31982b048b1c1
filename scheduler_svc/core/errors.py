"""Refusals of the core. Each names the thing, its value and the limit.

RefusedError(ValueError)
├── NeverFitsError     the request could not run even with the whole pool to itself
├── QueueFullError     too much is waiting; come back later
├── PinQuotaError      too many blocks are pinned
└── DuplicateKeyError  the client has a live request with this handle
"""


class RefusedError(ValueError):
    """A request that is not taken; nothing was changed."""


class NeverFitsError(RefusedError):
    """The request could not run even alone."""


class QueueFullError(RefusedError):
    """Too many requests or tokens are waiting."""


class PinQuotaError(RefusedError):
    """The tenant, or all tenants together, would pin too many blocks."""


class DuplicateKeyError(RefusedError):
    """The handle is in use."""
