"""What a system holds that reserves each request's memory in one piece when it is admitted: the paper's three Orcas.

Each step gives every running request one token. Requests are admitted first come, first served, by a buddy allocator,
as the paper assumes; the head of the queue is never passed over, and there is always one. A prompt takes one step.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.buddy import BuddyAllocator, next_power_of_two


class Reservation(enum.Enum):
    """How many slots a request is given."""

    MAX = "max"
    """As many as the model takes tokens: nothing is known of the output."""
    POW2 = "pow2"
    """For the output, the next power of two of its true length: at most twice what it needs."""
    ORACLE = "oracle"
    """Exactly what it needs: the true length is known."""

    def slots(self, prompt: int, output: int, longest: int) -> int:
        """Slots for a request with these lengths in tokens, where the model takes `longest`."""
        if self is Reservation.MAX:
            return longest
        if self is Reservation.POW2:
            return min(prompt + next_power_of_two(output), longest)
        return prompt + output


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Mean shares of the pool's slots, which add up to 1, and how many requests ran, mean over steps.

    tokens    hold the keys and values of a token
    reserved  will hold one of a token that is still to come
    internal  lie in a reservation and will never hold one
    external  lie outside every reservation: free and unused, or lost to the rounding of the allocator
    """

    tokens: float
    reserved: float
    internal: float
    external: float
    num_running: float


@dataclass(slots=True)
class _Running:
    start: int
    size: int
    reserved: int
    prompt: int
    output: int
    num_output: int = 0


def simulate(
    lengths: Sequence[tuple[int, int]], reservation: Reservation, num_slots: int, longest: int, warm_up: int
) -> Occupancy:
    """Runs requests with these (prompt, output) lengths until the queue is empty; counts the steps from the one that
    ends the `warm_up`-th request on. Raises ValueError for a request that never fits, or a warm-up without end."""
    pool = BuddyAllocator(num_slots)
    running: list[_Running] = []
    shares: list[tuple[float, float, float, int]] = []
    next_request = num_ended = 0
    while next_request < len(lengths):
        while next_request < len(lengths) and (
            request := _admit(pool, lengths[next_request], reservation, longest, bool(running))
        ):
            running.append(request)
            next_request += 1
        for request in running:
            request.num_output += 1
        if num_ended >= warm_up and next_request < len(lengths):
            shares.append(_shares(running, num_slots))
        for request in [each for each in running if each.num_output >= each.output]:
            pool.free(request.start, request.size)
            running.remove(request)
            num_ended += 1
    return _mean(shares, warm_up)


def _admit(
    pool: BuddyAllocator, lengths: tuple[int, int], reservation: Reservation, longest: int, is_busy: bool
) -> _Running | None:
    prompt, output = lengths
    reserved = reservation.slots(prompt, output, longest)
    piece = pool.allocate(reserved)
    if piece is None:
        if not is_busy:
            raise ValueError(f"a request of {reserved} slots never fits into a pool of {pool.num_slots}")
        return None
    return _Running(*piece, reserved, prompt, output)


def _shares(running: list[_Running], num_slots: int) -> tuple[float, float, float, int]:
    # The step that samples output token k computes the one before it.
    tokens = sum(each.prompt + each.num_output - 1 for each in running)
    needed = sum(each.prompt + each.output for each in running)
    reserved = sum(each.reserved for each in running)
    return tokens / num_slots, needed / num_slots, reserved / num_slots, len(running)


def _mean(shares: list[tuple[float, float, float, int]], warm_up: int) -> Occupancy:
    if not shares:
        raise ValueError(f"no step is left after a warm-up of {warm_up} requests; give more requests")
    tokens, needed, reserved, num_running = np.mean(shares, axis=0).tolist()
    return Occupancy(tokens, needed - tokens, reserved - needed, 1 - reserved, num_running)
