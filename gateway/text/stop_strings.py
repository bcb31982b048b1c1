"""Stop strings over a text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a stream of text and holds back what may become one.

    Each stop string is matched by the Knuth-Morris-Pratt automaton, character by character. So the outcome does not
    depend on how the text is cut into pieces, and the cost of a character is constant on average. The stop string that
    is complete first wins; of those that are complete at the same character, the longest.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._patterns = sorted(set(stop_strings), key=len, reverse=True)
        self._failures = [_failure_function(pattern) for pattern in self._patterns]
        self._matched = [0] * len(self._patterns)
        self._first_characters = frozenset(pattern[0] for pattern in self._patterns)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that is certain now, and the stop string once one is complete.

        The text never contains any part of the stop string. After a match the matcher is spent.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return text, None
        seen = self._held + text
        for position in range(len(self._held), len(seen)):
            stop_string = self._advance(seen[position])
            if stop_string is not None:
                self._held = ""
                return seen[: position + 1 - len(stop_string)], stop_string
        certain = len(seen) - max(self._matched)
        self._held = seen[certain:]
        return seen[:certain], None

    def pass_over(self, text: str) -> str:
        """As `push` for text in which no stop string may end; one that began in it may still end in what follows."""
        seen = self._held + text
        for character in text:
            self._advance(character)
        certain = len(seen) - max(self._matched)
        self._held = seen[certain:]
        return seen[:certain]

    def flush(self) -> str:
        """The held text, once nothing follows any more."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton by one character; the longest stop string that ends with it."""
        found = None
        for number, pattern in enumerate(self._patterns):
            failure, length = self._failures[number], self._matched[number]
            while length and pattern[length] != character:
                length = failure[length - 1]
            if pattern[length] == character:
                length += 1
            self._matched[number] = length
            if length == len(pattern):
                # What follows may begin inside of the match, but not be all of it again.
                self._matched[number] = failure[length - 1]
                if found is None:
                    found = pattern
        return found


def _failure_function(pattern: str) -> list[int]:
    """For each prefix of the pattern the length of its longest proper border."""
    failure = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[length] != pattern[position]:
            length = failure[length - 1]
        if pattern[length] == pattern[position]:
            length += 1
        failure[position] = length
    return failure
