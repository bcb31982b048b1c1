"""The limits of one replica."""

import enum
import sys
from dataclasses import dataclass

from scheduler_svc.core.paging.block_tables import BlockTableLayout

# A prompt goes on by as many if layers keep states.
_LEAST_MIXED = 3


class PolicyKind(enum.Enum):
    """In which order groups are admitted and preempted; see `policy`."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


class PreemptionMode(enum.Enum):
    """How a preempted group gives its blocks back.

    AUTO       one sequence is computed again, which costs little; several share blocks, which a swap keeps
    SWAP       to host memory wherever there is room
    RECOMPUTE  never to host memory
    """

    AUTO = "auto"
    SWAP = "swap"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of one replica. Raises ValueError when they contradict each other.

    `max_model_len` is the model's own limit; `max_len` is the one that counts. `watermark` is the share of the blocks
    that admission leaves free, `pin_quota` the share that one tenant's pins may hold, `max_pinned` that of all pins.
    `tenant_overflow` is the share of the queue's bounds that tenants below their equal part of it may take beyond them.
    `max_prefill_share` is the share of a step's remaining tokens that a prompt takes while shorter prompts wait. A step
    that also decodes computes at most `max_mixed_prefill_tokens` of prompts, if that is given and no more requests wait
    than run. With `prepares_constraints` the workers compile constraints before rows need them. `max_adapters` is the
    workers' number of adapter slots. A sample may extend its row by one token and up to `max_drafts` drafts of the
    worker, while that pays: the fixed cost of a step equals the cost of `fixed_tokens` tokens (see `DraftBudget`). With
    `caches_on_host` the host blocks also keep blocks that the pool evicts. The layers of the model are in `full_groups`
    and `windowed_groups` (see `LayerGroups`); a sequence has `state_blocks` blocks for layers that keep a state. With
    `output_checkpoints` its state is copied every 64 tokens of output.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_waiting_requests: int = 1024
    max_waiting_tokens: int = 1_000_000
    tenant_overflow: float = 1.0
    watermark: float = 0.01
    num_host_blocks: int = 0
    caches_on_host: bool = False
    policy: PolicyKind = PolicyKind.FCFS
    preemption_mode: PreemptionMode = PreemptionMode.AUTO
    pin_quota: float = 0.25
    max_pinned: float = 0.5
    max_prefill_share: float = 0.5
    max_mixed_prefill_tokens: int | None = None
    prepares_constraints: bool = False
    max_adapters: int = 0
    max_drafts: int = 0
    max_passes: int = 1
    fixed_tokens: int = 16
    full_groups: int = 1
    windowed_groups: int = 0
    window: int = 0
    state_blocks: int = 0
    output_checkpoints: bool = True

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_passes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence takes one token of a step"
            )
        for name in ("num_host_blocks", "max_adapters", "max_drafts", "fixed_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must not be negative")
        if self.full_groups + self.windowed_groups < 1 or min(self.full_groups, self.windowed_groups) < 0:
            raise ValueError(f"the layers are in {self.full_groups} and {self.windowed_groups} groups, must be some")
        if self.windowed_groups and (self.window < 2 or self.num_blocks <= self.full_groups + self.windowed_groups):
            raise ValueError(
                f"window is {self.window}, must be at least 2, and {self.num_blocks} blocks must be more than groups"
            )
        if self.state_blocks < 0 or 2 * self.state_blocks >= self.num_usable_blocks:
            raise ValueError(
                f"the state of a sequence takes {self.state_blocks} blocks, and a sequence needs room for two and for "
                f"its tokens; the pool has {self.num_blocks} blocks"
            )
        if self.state_blocks and self.max_num_batched_tokens < self.max_num_seqs + 2:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; layers keep states, so it must be at least "
                f"max_num_seqs + 2 ({self.max_num_seqs + 2})"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}, must be in [0, 1)")
        for name in ("pin_quota", "max_pinned", "tenant_overflow"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be in [0, 1]")
        if not 0 < self.max_prefill_share <= 1:
            raise ValueError(f"max_prefill_share is {self.max_prefill_share}, must be in (0, 1]")
        if self.max_mixed_prefill_tokens is not None and self.max_mixed_prefill_tokens < _LEAST_MIXED:
            raise ValueError(
                f"max_mixed_prefill_tokens is {self.max_mixed_prefill_tokens}, must be at least {_LEAST_MIXED}, or None"
            )

    @property
    def swaps_from(self) -> int:
        """The minimum number of sequences with which a preempted group is swapped, not computed again. A group whose
        layers keep states continues from checkpoints: its newest states are those after steps whose results may be
        dropped."""
        if self.state_blocks:
            return sys.maxsize
        return {PreemptionMode.AUTO: 2, PreemptionMode.SWAP: 1, PreemptionMode.RECOMPUTE: sys.maxsize}[
            self.preemption_mode
        ]

    @property
    def layout(self) -> BlockTableLayout:
        """How block tables are laid out: the workers' `LayerGroups`, and the size of blocks."""
        return BlockTableLayout(self.block_size, self.full_groups, self.windowed_groups, self.window)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks of the pool for sequences: all but the one that stands for blocks that no layer reads."""
        return self.num_blocks - (self.windowed_groups > 0)

    @property
    def windows_reach(self) -> int:
        """Blocks of each windowed group that a sequence which is computed by itself gets at first: for the window, or
        the chunk in flight, which is not sealed yet, and for the next chunk."""
        chunk = self.max_num_batched_tokens
        return -(-(max(self.window, chunk) + chunk) // self.block_size) + 1

    @property
    def max_windowed(self) -> int:
        """The maximum number of blocks that such a sequence holds of a windowed group. When it comes back from host
        memory, it may have a window of cached blocks that it does not read."""
        return self.windows_reach + -(-self.window // self.block_size) + 2

    def blocks_for(self, num_tokens: int) -> int:
        """The maximum number of blocks that a sequence which is computed by itself holds for this many tokens."""
        num_logical = -(-num_tokens // self.block_size)
        num_windowed = min(num_logical, self.max_windowed)
        return self.full_groups * num_logical + self.windowed_groups * num_windowed + self._blocks_for_states

    @property
    def _blocks_for_states(self) -> int:
        """Blocks of a sequence's state, and of the checkpoint that it is copied from as it begins."""
        return 2 * self.state_blocks

    @property
    def max_len(self) -> int:
        """The maximum number of tokens of a sequence: the model's limit or the whole pool, whichever is less."""
        num_blocks = self.num_usable_blocks - self._blocks_for_states
        num_logical = num_blocks // (self.full_groups + self.windowed_groups)
        if num_logical >= self.max_windowed and self.windowed_groups:
            left = num_blocks - self.windowed_groups * self.max_windowed
            num_logical = left // self.full_groups if self.full_groups else self.max_model_len
        return min(self.max_model_len, num_logical * self.block_size)
