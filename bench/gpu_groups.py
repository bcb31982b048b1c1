"""Runs groups of checks and of figures, one after the other, even if one fails."""

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from bench.gpu_findings import Findings

Item = TypeVar("Item")
Groups = Iterable[tuple[str, Iterator[Item]]]


class DeviceLostError(Exception):
    """The device does no more work for this process."""


@dataclass(frozen=True, slots=True)
class Collector:
    """Runs groups.

    Attributes:
        save: called whenever `findings` has grown.
        works: whether the device still works for this process; called after an error.
    """

    findings: Findings
    save: Callable[[], None]
    works: Callable[[], bool]

    def collect(self, groups: Groups[Item], take: Callable[[Item], None], deadline: float) -> None:
        """Takes all items of groups that were not begun before. An error ends only its own group.

        Args:
            deadline: of `time.monotonic`; groups that would begin after it are late.

        Raises:
            DeviceLostError: the device does not work any more. Groups after the broken one were not begun.
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
        """Returns False if an error, which is printed, cut the group short."""
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
