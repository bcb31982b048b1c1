"""The workers' adapter slots: the adapter that each slot holds, and the number of rows that use it. The core owns the
slots, as it owns blocks; workers load adapters into the slots that the core names.

A slot keeps its adapter while rows use it. If a request needs an adapter and rows use all slots, one slot is drained:
no further request with its adapter enters until another adapter was loaded there. So no adapter waits forever for
slots that are in constant use.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler_svc.core.request import Adapter, Need, RequestKey


@dataclass(slots=True)
class _Slot:
    """`adapter` is None if the slot is empty or loads an adapter. `loaded` and `last_used` order slots by time."""

    adapter: Adapter | None = None
    is_loading: bool = False
    is_drained: bool = False
    num_rows: int = 0
    last_used: int = 0
    loaded: int = 0


class AdapterSlots:
    """All slots are empty at first, as in workers that were just attached.

    Attributes:
        owed: Requests that an adapter was loaded for, until a request with this adapter is next, and the adapters.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._of_adapter: dict[Adapter, int] = {}
        self._num_events = 0
        self.owed: dict[RequestKey, Adapter] = {}
        # The adapter of the latest group that was next in the current or last step.
        self._next: Adapter | None = None

    def slot_of(self, adapter: Adapter) -> int | None:
        return self._of_adapter.get(adapter)

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether a request with the adapter may enter."""
        slot = self._of_adapter.get(adapter)
        return slot is not None and not self._slots[slot].is_drained

    def entering(self, adapter: Adapter | None) -> None:
        """The request that is next has this adapter; None if it has none, or if a step's planning starts."""
        self._next = adapter
        self.owed = {key: owed for key, owed in self.owed.items() if owed != adapter}

    def use(self, adapter: Adapter, num_rows: int) -> None:
        """This number of rows more use the adapter, which is loaded."""
        slot = self._slots[self._of_adapter[adapter]]
        slot.num_rows += num_rows
        slot.last_used = self._next_event()

    def num_rows(self) -> dict[Adapter, int]:
        """The rows of each adapter that is loaded."""
        return {adapter: self._slots[slot].num_rows for adapter, slot in self._of_adapter.items()}

    def loading(self) -> list[int]:
        return [number for number, slot in enumerate(self._slots) if slot.is_loading]

    def may_take(self, adapter: Adapter) -> bool:
        """Whether `take` has a slot now."""
        if (own := self._of_adapter.get(adapter)) is not None:
            return not self._slots[own].num_rows
        return self._empty() is not None or bool(self._unused())

    def slot_for(self, adapter: Adapter, held: Collection[Need], stuck: set[type[Need]]) -> int | None:
        """A slot to load an adapter into: an empty one, or, if a request that is next waits for it, an unused one.
        `held` are the needs that such requests wait for. If no other adapter has a slot either, adds the kind to
        `stuck`."""
        is_drained = adapter in self._of_adapter
        if adapter not in held:
            return None if is_drained or (empty := self._empty()) is None else self._begin(empty)
        if is_drained and any(isinstance(need, Adapter) and need != adapter for need in held):
            # The slot was drained for one of the other adapters.
            return None
        slot = self.take(adapter)
        if slot is None and not is_drained:
            stuck.add(Adapter)
        return slot

    def take(self, adapter: Adapter) -> int | None:
        """A slot to load an adapter into that a request needs now: its own slot if that is drained, an empty slot, or
        the least recently used slot that no row uses and whose adapter is not `kept`. If there is none, returns None
        and drains the slot that was loaded first, unless a slot is drained already."""
        if (own := self._of_adapter.get(adapter)) is not None:
            return None if self._slots[own].num_rows else self._begin(own)
        if (empty := self._empty()) is not None:
            return self._begin(empty)
        if unused := self._unused():
            return self._begin(min(unused)[2])
        used = [self._slots[number] for number in self._of_adapter.values() if self._slots[number].num_rows]
        if used and not any(slot.is_drained for slot in used):
            min(used, key=lambda slot: slot.loaded).is_drained = True
        return None

    @property
    def kept(self) -> set[Adapter]:
        """Adapters that are not evicted for another one."""
        return {*self.owed.values(), *filter(None, (self._next,))}

    def _empty(self) -> int | None:
        empty = (number for number, slot in enumerate(self._slots) if slot.adapter is None and not slot.is_loading)
        return next(empty, None)

    def _unused(self) -> list[tuple[bool, int, int]]:
        """Slots whose adapter may be evicted. The slot to take first is the lowest."""
        kept = self.kept
        loaded = [(self._slots[number], number) for each, number in self._of_adapter.items() if each not in kept]
        return [(not slot.is_drained, slot.last_used, number) for slot, number in loaded if not slot.num_rows]

    def _begin(self, number: int) -> int:
        """Evicts the adapter in a slot that no row uses, if there is one. A load into the slot begins."""
        slot = self._slots[number]
        assert not slot.num_rows
        if slot.adapter is not None:
            del self._of_adapter[slot.adapter]
        slot.adapter, slot.is_loading, slot.is_drained = None, True, False
        return number

    def loaded(self, number: int, adapter: Adapter | None, keys: Iterable[RequestKey] = ()) -> None:
        """The load into a slot ended; `adapter` is None if it failed or took too long. Requests with these keys waited
        for it."""
        slot = self._slots[number]
        slot.is_loading, slot.adapter = False, adapter
        slot.last_used = slot.loaded = self._next_event()
        if adapter is not None:
            self._of_adapter[adapter] = number
            self.owed |= dict.fromkeys(keys, adapter)

    def _next_event(self) -> int:
        self._num_events += 1
        return self._num_events
