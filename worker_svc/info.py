"""What a worker is: the values that it reports on attach and checks steps against."""

from dataclasses import dataclass

from quire.compatibility import UNKNOWN_MODEL, ModelFingerprint


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The KV pool: for each layer a tensor [2, num_blocks, num_kv_heads, block_size, head_dim]."""

    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int
    """One block over all layers, keys and values."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The model as the scheduler needs to know it."""

    architecture: str
    dtype: str
    vocab_size: int
    """Width of the logits; token ids are below this."""
    max_model_len: int
    """Positions of one sequence that can be computed."""
    device: str


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of one step."""

    max_num_rows: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a worker process."""

    worker_generation: int
    rank: int
    world_size: int
    pool: PoolGeometry
    model: ModelGeometry
    limits: WorkerLimits
    fingerprint: ModelFingerprint = UNKNOWN_MODEL
