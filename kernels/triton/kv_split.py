"""How a decode's context is cut into pieces that are attended to in parallel."""

import functools
from dataclasses import dataclass

from kernels.triton.launch import ceil_div


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the decode kernel is cut and launched.

    Attributes:
        tile: tokens whose keys are loaded at once, a power of two of at least 16.
        programs_per_sm: programs that keep a multiprocessor's share of the memory busy; more may run at a time. One has
            two tiles on their way, 64 kB with heads of 128 in bfloat16; a multiprocessor of an H200 must have about 36
            kB on their way (4.8 TB/s, an answer in 1 us). The second covers for what the first computes. Reckoned, not
            measured.
        shortest_split, longest_split: bounds on the tokens of a piece. Shorter ones cost more to join than they win;
            longer ones leave multiprocessors idle where rows differ in length.
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 5
    programs_per_sm: int = 2
    shortest_split: int = 256
    longest_split: int = 2048


# Of the best utilization that any number of pieces has, the share that is good enough to take fewer pieces.
GOOD_ENOUGH = 0.9


# It is the same for all layers of a step, and takes longer than their launches.
@functools.lru_cache(maxsize=64)
def split_length(tiling: DecodeTiling, num_programs: int, max_seq_len: int, num_sms: int) -> int:
    """Tokens in each piece of the longest context; a multiple of the tile.

    Shorter contexts are cut into as many pieces, or fewer where they would be shorter than the shortest. Few rows get
    many pieces, so that all multiprocessors have work; many rows get few.

    Args:
        num_programs: rows times KV heads, what there is without a split.
        max_seq_len: the longest context.
        num_sms: multiprocessors of the device.
    """
    slots = num_sms * tiling.programs_per_sm
    fewest = ceil_div(max_seq_len, tiling.longest_split)
    most = max(fewest, min(ceil_div(max_seq_len, tiling.shortest_split), ceil_div(4 * slots, num_programs)))
    counts = range(fewest, most + 1)
    utilizations = [_utilization(num_programs * count, slots) for count in counts]
    enough = GOOD_ENOUGH * max(utilizations)
    pieces = next(count for count, each in zip(counts, utilizations, strict=True) if each >= enough)
    return ceil_div(ceil_div(max_seq_len, pieces), tiling.tile) * tiling.tile


def _utilization(num_programs: int, slots: int) -> float:
    """The share of slots in use over all waves in which equally long programs run."""
    return num_programs / (ceil_div(num_programs, slots) * slots)
