"""Whether this replica is one to send requests to."""

from collections.abc import Callable


class Readiness:
    """A replica is ready while it has its worker and does not drain. `report` is told whenever that changes; it is not
    ready at first, and never again once it drains."""

    def __init__(self, report: Callable[[bool], None]) -> None:
        self._report = report
        self._is_attached = False
        self._is_draining = False

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        return self._is_attached and not self._is_draining

    def set_attached(self, is_attached: bool) -> None:
        """The worker has come, or is gone."""
        before, self._is_attached = self.is_ready, is_attached
        self._tell_change(before)

    def drain(self) -> None:
        """No request is taken any more. Idempotent."""
        before, self._is_draining = self.is_ready, True
        self._tell_change(before)

    def _tell_change(self, before: bool) -> None:
        if self.is_ready != before:
            self._report(self.is_ready)
