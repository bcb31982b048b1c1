"""How long to wait before a dead process is started again."""


class RestartBackoff:
    """Doubles the wait with each death in a row; a life long enough forgives what was before.

    Who ended by itself, as services do when they are told to or when they lost a peer, did not die and waits no longer
    than after a first death.
    """

    def __init__(self, *, first_s: float = 0.1, longest_s: float = 5.0, forgiven_after_s: float = 30.0) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._forgiven_after_s = forgiven_after_s
        self._next_s = first_s

    def delay_s(self, lived_s: float, *, died: bool = True) -> float:
        """The wait after a life of `lived_s` seconds."""
        if not died:
            return self._first_s
        if lived_s >= self._forgiven_after_s:
            self._next_s = self._first_s
        delay = self._next_s
        self._next_s = min(2 * delay, self._longest_s)
        return delay
