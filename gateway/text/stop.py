"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, shared by all its sequences."""

    __slots__ = ("first_characters", "longest_first")

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.longest_first = tuple(sorted(dict.fromkeys(stop_strings), key=len, reverse=True))
        self.first_characters = frozenset(stop_string[0] for stop_string in self.longest_first)


class StopMatcher:
    """Finds the first stop string in the text of one sequence and holds back text that may become one.

    The match is the stop string that ends first; if several end at the same character, the longest of them. So the
    result does not depend on how the text is split into pieces.

    Invariant: the held text is the longest suffix of the text so far that is the start of a stop string. So it is
    shorter than the longest stop string, and every later match begins in it or after it.
    """

    __slots__ = ("_held", "_started", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""
        # The stop string that starts with the held text. It is tried first: while it continues to match, no other one
        # can hold back more, so that a long repetitive text costs one comparison a piece.
        self._started = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that is certain now, and the stop string once one is complete.

        The text never contains a part of the stop string. The matcher is not used after a match.
        """
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text, None
        seen = self._held + text
        found, first_end = None, len(seen) + 1
        for stop_string in self._stops.longest_first:
            start = max(len(self._held) + 1 - len(stop_string), 0)
            # Only an earlier end wins: of two with the same end, the longer one was tried first.
            position = seen.find(stop_string, start, first_end - 1)
            if position >= 0:
                found, first_end = stop_string, position + len(stop_string)
        if found is None:
            return self._release(seen), None
        self._held = ""
        return seen[: first_end - len(found)], found

    def pass_over(self, text: str) -> str:
        """Like `push`, for text in which no stop string may end; one that starts in it may still end later."""
        return self._release(self._held + text)

    def flush(self) -> str:
        """The held text, after the last piece."""
        held, self._held = self._held, ""
        return held

    def _release(self, seen: str) -> str:
        """Holds back the end of `seen` that may become a stop string; returns the text before it."""
        held_from = len(seen)
        for stop_string in (self._started, *self._stops.longest_first):
            start = max(len(seen) + 1 - len(stop_string), 0)
            while start < held_from and (start := seen.find(stop_string[:1], start, held_from)) >= 0:
                if stop_string.startswith(seen[start:]):
                    held_from, self._started = start, stop_string
                start += 1
        self._held = seen[held_from:]
        return seen[:held_from]
