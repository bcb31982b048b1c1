"""What becomes of a session when a newer one takes its place."""

from quire.rpc.errors import FailedPrecondition


class SupersededError(FailedPrecondition):
    """A scheduler of a higher epoch has taken over this worker, or another rank of it."""

    default_reason = "SUPERSEDED"
