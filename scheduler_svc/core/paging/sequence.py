"""Sequences, the groups in which they are scheduled, and queues of groups (the paper's sections 4.4 and 4.5)."""

import enum
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from scheduler_svc.core.paging.block_pool import BlockId


class SequenceStatus(enum.Enum):
    """WAITING -> RUNNING -> (SWAPPED | WAITING again by recompute) -> RUNNING -> FINISHED."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One line of text that is being generated for the request `key`, up to `max_len` tokens or a stop token.

    The worker draws its tokens; if it `is_dependent`, as a beam of a search is, they are chosen from a step's result.
    `token_ids` are the prompt and the output of all results so far, without tokens that steps in flight will sample.
    `row` is its slot in the worker's batch, None unless it runs or waits there to be forked. While it is swapped,
    `block_table` names blocks of the host pool, which hold keys and values of its first `num_swapped_tokens` tokens.
    """

    key: Hashable
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    max_len: int
    stop_token_ids: frozenset[int] = frozenset()
    is_dependent: bool = False
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[BlockId] = field(default_factory=list[BlockId])
    num_swapped_tokens: int = 0
    row: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


S = TypeVar("S", bound=Sequence)


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceGroup(Generic[S]):
    """All sequences of one request. It is scheduled, preempted, swapped and resumed as one (the paper's section 4.5).
    `order` is its place in queues: unique, the lowest goes first."""

    key: Hashable
    order: int
    sequences: list[S]
    preemptions: int = 0

    @property
    def unfinished(self) -> list[S]:
        finished = SequenceStatus.FINISHED
        return [sequence for sequence in self.sequences if sequence.status is not finished]

    @property
    def computing(self) -> list[S]:
        """Sequences that need blocks: one without output, from which such others fork, then all that have output."""
        unfinished = self.unfinished
        if len(unfinished) == 1:
            return unfinished
        without_output = [sequence for sequence in unfinished if not sequence.num_output_tokens]
        return [*without_output[:1], *(sequence for sequence in unfinished if sequence.num_output_tokens)]

    def restart(self) -> None:
        """The group left the batch, and its sequences wait."""
        for sequence in self.unfinished:
            sequence.status = SequenceStatus.WAITING


G = TypeVar("G", bound=SequenceGroup[Any])
ORDER = attrgetter("order")


class GroupQueue(Generic[G]):
    """Groups by their `order`, lowest first. Searching costs O(log n)."""

    def __init__(self) -> None:
        self._groups: list[G] = []
        self._by_key: dict[Hashable, G] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    @property
    def has_next(self) -> bool:
        return bool(self._groups)

    def get(self, key: Hashable) -> G:
        """The group with this key. Raises KeyError if it is not here."""
        return self._by_key[key]

    def first(self) -> G:
        return self._groups[0]

    def last(self) -> G:
        return self._groups[-1]

    def add(self, group: G) -> None:
        insort(self._groups, group, key=ORDER)
        self._by_key[group.key] = group

    def remove(self, key: Hashable) -> G:
        """Removes a group and returns it. Raises KeyError if it is not here."""
        group = self._by_key.pop(key)
        del self._groups[bisect_left(self._groups, group.order, key=ORDER)]
        return group


Queues = tuple[GroupQueue[G], GroupQueue[G], GroupQueue[G]]
"""The waiting, the swapped and the running groups."""
