"""The role of a replica, if prompts and the tokens after them are computed by different replicas."""

import enum

from quire.common.v1 import common_pb2


class ReplicaRole(enum.StrEnum):
    """The work that a replica gets by preference, `--role` of its scheduler."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def message(self) -> common_pb2.ReplicaRole:
        return _MESSAGES[self]

    @classmethod
    def of(cls, message: int) -> "ReplicaRole":
        """BOTH for one that this release does not know."""
        return next((role for role, value in _MESSAGES.items() if value == message), cls.BOTH)


_MESSAGES = {
    ReplicaRole.BOTH: common_pb2.REPLICA_ROLE_UNSPECIFIED,
    ReplicaRole.PREFILL: common_pb2.REPLICA_ROLE_PREFILL,
    ReplicaRole.DECODE: common_pb2.REPLICA_ROLE_DECODE,
}
