"""What a step has to compute and to move, and the interface of what says how long that takes."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from scheduler_svc.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a cost model knows of a step.

    num_tokens       tokens that the step computes
    num_samples      tokens that it samples, one for each row of logits
    num_chunk_tokens those of `num_tokens` that are in chunks of prompts: rows with more than one token
    num_chunks       rows with more than one token
    context_tokens   tokens whose keys and values are read: of each row all up to its newest
    attended_pairs   pairs of a new token and a token that it attends to
    copied_blocks    blocks copied inside the pool
    swapped_blocks   blocks moved between the pool and host memory, both ways
    """

    num_tokens: int
    num_samples: int
    num_chunk_tokens: int
    num_chunks: int
    context_tokens: int
    attended_pairs: int
    copied_blocks: int = 0
    swapped_blocks: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        """The work of one step."""
        new, computed = plan.num_new_tokens, plan.num_computed_tokens
        is_chunk = new > 1
        return cls(
            num_tokens=int(new.sum()),
            num_samples=len(plan.samples),
            num_chunk_tokens=int(new[is_chunk].sum()),
            num_chunks=int(np.count_nonzero(is_chunk)),
            context_tokens=int(new.sum() + computed.sum()),
            attended_pairs=int((new * computed + new * (new + 1) // 2).sum()),
            copied_blocks=len(plan.copies),
            swapped_blocks=len(plan.swap_in) + len(plan.swap_out),
        )


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """How long one step takes.

    launch  from the plan to the moment when the device could begin; hidden while the device is in the step before
    device  on the device, which runs one step after the other
    answer  from the end on the device to the moment when the scheduler has the result
    """

    device: float
    launch: float = 0.0
    answer: float = 0.0


class CostModel(Protocol):
    """Says how long steps take. The same work takes the same time."""

    def seconds(self, work: StepWork) -> StepSeconds: ...
