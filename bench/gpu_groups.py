"""Groups of checks and of figures, one after the other, whatever becomes of each."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from bench.gpu_findings import Findings

Item = TypeVar("Item")
Groups = Iterable[tuple[str, Iterator[Item]]]


class DeviceLostError(Exception):
    """Nothing that this process does on the device works any more."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Goes through groups.

    Attributes:
        save: called whenever `findings` has grown.
        works: whether the device takes more work of this process; asked after an error.
    """

    findings: Findings
    save: Callable[[], None]
    works: Callable[[], bool]

    def collect(self, groups: Groups[Item], take: Callable[[Item], None], deadline: float) -> None:
        """Takes all items of groups that were not begun before. An error does not take the other groups along.

        Args:
            deadline: of `time.monotonic`; groups that come after it are late.

        Raises:
            DeviceLostError: the device does not work any more. Groups behind the one that broke were not begun.
        """
        findings = self.findings
        for name, group in self._listed(groups):
            if name in findings.begun:
                continue
            if time.monotonic() > deadline:
                findings.late.append(name)
                continue
            findings.begin(name)
            self.save()
            if self._take_all(group, take):
                findings.end(name)
            elif not self.works():
                raise DeviceLostError(name)

    def _take_all(self, group: Iterator[Item], take: Callable[[Item], None]) -> bool:
        """False where an error, which is printed, cut the group short."""
        try:
            for item in group:
                take(item)
                self.save()
        except Exception:
            traceback.print_exc()
            return False
        return True

    def _listed(self, groups: Groups[Item]) -> Groups[Item]:
        """The groups up to an error between two of them."""
        try:
            yield from groups
        except Exception:
            traceback.print_exc()
            self.findings.broken.append("what comes before the next group")
