"""What the workers of a replica are, as the scheduler learns it when it attaches."""

from dataclasses import dataclass, replace

from quire.compatibility import UNKNOWN_MODEL, ModelFingerprint, differing_parts


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Pool geometry, model and limits, as the worker of rank 0 reports them."""

    worker_generation: int
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_rows: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    max_logprobs: int
    fingerprint: ModelFingerprint = UNKNOWN_MODEL

    def is_same_worker(self, other: "ReplicaInfo | None") -> bool:
        """Whether the other one is the same start of the same workers."""
        return other is not None and other.worker_generation == self.worker_generation

    def model_changes(self, before: "ReplicaInfo") -> list[str]:
        """In what this model differs from the one before, each with both values; empty where it may be the same."""
        changes = [
            f"{name} {old} and {new}"
            for name, old, new in (
                ("architecture", before.architecture, self.architecture),
                ("vocab_size", before.vocab_size, self.vocab_size),
            )
            if old != new
        ]
        return changes + differing_parts(before.fingerprint, self.fingerprint)

    def has_tokenizer_of(self, before: "ReplicaInfo") -> bool:
        """Whether token ids mean the same, as far as both say which tokenizer they have."""
        ours, theirs = self.fingerprint.tokenizer, before.fingerprint.tokenizer
        return self.vocab_size == before.vocab_size and not (ours and theirs and ours != theirs)

    def is_like(self, other: "ReplicaInfo | None") -> bool:
        """Whether the other one is alike in all but the start of its workers."""
        return other is not None and replace(other, worker_generation=self.worker_generation) == self
