"""What bounds one replica."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one replica. Raises ValueError when they contradict each other.

    `max_model_len` is the model's own limit; `max_len` is the one that counts.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1_000_000
    watermark: float = 0.01

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence takes one token of a step"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}, must be in [0, 1)")

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence can have: the model's limit or the whole pool, whichever is less."""
        return min(self.max_model_len, self.num_blocks * self.block_size)
