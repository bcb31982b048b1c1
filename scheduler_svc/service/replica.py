"""What the workers of a replica are, as the scheduler learns it when it attaches."""

from dataclasses import dataclass, replace

from quire.compatibility import UNKNOWN_MODEL, ModelFingerprint


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

    def is_like(self, other: "ReplicaInfo | None") -> bool:
        """Whether the other one is alike in all but the start of its workers."""
        return other is not None and replace(other, worker_generation=self.worker_generation) == self
