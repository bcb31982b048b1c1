"""Stop strings over a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a call, shared by all its sequences."""

    __slots__ = ("first_characters", "longest_first")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.longest_first = tuple(sorted(set(stop_strings), key=len, reverse=True))
        self.first_characters = frozenset(stop_string[0] for stop_string in self.longest_first)


class StopMatcher:
    """Finds the first stop string in the text of one sequence and holds back what may become one.

    The stop string that is complete first wins; of those that are complete at the same character, the longest. So the
    outcome does not depend on how the text is cut into pieces.

    Invariant: the held text is the longest end of the text so far that a stop string begins with. So it is shorter than
    the longest stop string, and whatever is found later begins in it or after it.
    """

    __slots__ = ("_beginning", "_held", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""
        # The stop string that the held text is the beginning of. It is tried first: while it goes on to match, no other
        # one is looked at.
        self._beginning = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that is certain now, and the stop string once one is complete.

        The text never contains any part of the stop string. After a match the matcher is spent.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text, None
        seen = self._held + text
        found, end = self._find(seen)
        if found is not None:
            self._held = ""
            return seen[: end - len(found)], found
        return self._release(seen), None

    def pass_over(self, text: str) -> str:
        """As `push` for text in which no stop string may end; one that began in it may still end in what follows."""
        return self._release(self._held + text)

    def flush(self) -> str:
        """The held text, once nothing follows any more."""
        held, self._held = self._held, ""
        return held

    def _find(self, seen: str) -> tuple[str | None, int]:
        """The stop string that ends first in what follows the held text, and where it ends."""
        found, first_end = None, len(seen) + 1
        for stop_string in self._stops.longest_first:
            start = max(len(self._held) + 1 - len(stop_string), 0)
            # One that ends later than the one found, or where that ends, does not win.
            position = seen.find(stop_string, start, first_end - 1)
            if position >= 0:
                found, first_end = stop_string, position + len(stop_string)
        return found, first_end

    def _release(self, seen: str) -> str:
        """The text before what is held from now on."""
        held_from = len(seen)
        for stop_string in (self._beginning, *self._stops.longest_first):
            start = max(len(seen) + 1 - len(stop_string), 0)
            while start < held_from and (start := seen.find(stop_string[:1], start, held_from)) >= 0:
                if stop_string.startswith(seen[start:]):
                    held_from, self._beginning = start, stop_string
                start += 1
        self._held = seen[held_from:]
        return seen[:held_from]
