"""The workers' slots of adapters: which adapter each slot holds, and how many rows use it. The core owns them, as it
owns blocks; workers load what they are told into the slot that they are told.

A slot that rows use keeps its adapter. If an adapter is needed and rows use all slots, one of them is drained: no
further request enters with its adapter until another one was loaded there, so that no adapter waits for ever behind
those that are in constant use.
"""

from dataclasses import dataclass

from scheduler_svc.core.request import Adapter


@dataclass(slots=True)
class _Slot:
    """`adapter` is None while the slot is empty or has one loaded. `loaded` and `last_used` order slots by time."""

    adapter: Adapter | None = None
    is_loading: bool = False
    is_drained: bool = False
    num_rows: int = 0
    last_used: int = 0
    loaded: int = 0


class AdapterSlots:
    """All slots are empty at first, as those of workers are that were just attached."""

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
        """One row fewer uses it."""
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
        """A slot to load an adapter into, of those that hold none."""
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
        """A slot to load an adapter into that a request needs now: its own if it is drained; an empty one; or that
        which no row uses for the longest time, but for those of adapters to be `kept`. If there is none, drains the one
        that was loaded first, unless one is drained already."""
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
        """The load into a slot is answered; None if it failed, or if nobody waits for it any more."""
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
