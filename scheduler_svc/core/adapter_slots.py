"""The workers' adapter slots: the adapter that each slot holds, and the number of rows that use it. The core owns the
slots, as it owns blocks; workers load adapters into the slots that the core names.

A slot keeps its adapter while rows use it. If a request needs an adapter and rows use all slots, one slot is drained:
no further request with its adapter enters until another adapter was loaded there. So no adapter waits forever for
slots that are in constant use.
"""

from dataclasses import dataclass

from scheduler_svc.core.request import Adapter


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
    """All slots are empty at first, as in workers that were just attached."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._of_adapter: dict[Adapter, int] = {}
        self._num_events = 0

    def slot_of(self, adapter: Adapter) -> int | None:
        """The slot that the adapter is loaded in."""
        return self._of_adapter.get(adapter)

    def is_ready(self, adapter: Adapter) -> bool:
        """Whether a request with the adapter may enter."""
        slot = self._of_adapter.get(adapter)
        return slot is not None and not self._slots[slot].is_drained

    def enter(self, adapter: Adapter) -> None:
        """A row uses the adapter, which is loaded."""
        slot = self._slots[self._of_adapter[adapter]]
        slot.num_rows += 1
        slot.last_used = self._next_event()

    def leave(self, adapter: Adapter) -> None:
        """One row fewer uses the adapter."""
        slot = self._slots[self._of_adapter[adapter]]
        slot.num_rows -= 1
        slot.last_used = self._next_event()

    def num_rows(self) -> dict[Adapter, int]:
        """The rows of each adapter that is loaded."""
        return {adapter: self._slots[slot].num_rows for adapter, slot in self._of_adapter.items()}

    def loading(self) -> list[int]:
        """The slots into which an adapter is being loaded."""
        return [number for number, slot in enumerate(self._slots) if slot.is_loading]

    def take_empty(self) -> int | None:
        """An empty slot to load an adapter into; None if there is none."""
        for number, slot in enumerate(self._slots):
            if slot.adapter is None and not slot.is_loading:
                return self._begin(number)
        return None

    def may_take(self, adapter: Adapter, kept: set[Adapter]) -> bool:
        """Whether `take` has a slot now."""
        if (own := self._of_adapter.get(adapter)) is not None:
            return not self._slots[own].num_rows
        is_empty = any(slot.adapter is None and not slot.is_loading for slot in self._slots)
        loaded = (self._slots[number] for each, number in self._of_adapter.items() if each not in kept)
        return is_empty or any(not slot.num_rows for slot in loaded)

    def take(self, adapter: Adapter, kept: set[Adapter]) -> int | None:
        """A slot to load an adapter into that a request needs now: its own slot if that is drained, an empty slot, or
        the least recently used slot that no row uses and whose adapter is not `kept`. If there is none, returns None
        and drains the slot that was loaded first, unless a slot is drained already."""
        if (own := self._of_adapter.get(adapter)) is not None:
            return None if self._slots[own].num_rows else self._evict(own)
        if (empty := self.take_empty()) is not None:
            return empty
        loaded = [(self._slots[number], number) for each, number in self._of_adapter.items() if each not in kept]
        if unused := [(not slot.is_drained, slot.last_used, number) for slot, number in loaded if not slot.num_rows]:
            return self._evict(min(unused)[2])
        used = [self._slots[number] for number in self._of_adapter.values() if self._slots[number].num_rows]
        if used and not any(slot.is_drained for slot in used):
            min(used, key=lambda slot: slot.loaded).is_drained = True
        return None

    def _evict(self, number: int) -> int:
        evicted = self._slots[number].adapter
        assert evicted is not None
        assert not self._slots[number].num_rows
        del self._of_adapter[evicted]
        self._slots[number].adapter = None
        return self._begin(number)

    def loaded(self, number: int, adapter: Adapter | None) -> None:
        """The load into a slot ended. `adapter` is None if it failed, or if no request waits for it any more."""
        slot = self._slots[number]
        slot.is_loading, slot.adapter = False, adapter
        slot.last_used = slot.loaded = self._next_event()
        if adapter is not None:
            self._of_adapter[adapter] = number

    def _begin(self, number: int) -> int:
        slot = self._slots[number]
        slot.is_loading, slot.is_drained = True, False
        return number

    def _next_event(self) -> int:
        self._num_events += 1
        return self._num_events
