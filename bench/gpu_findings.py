"""Findings of a run of `bench.gpu` so far, their file, from which another run continues, and the collector that runs
groups of checks and of figures, one after the other, even if one fails."""

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from bench.gpu_checks import Check
    from bench.gpu_figures import Figure


Item = TypeVar("Item")
Groups = Iterable[tuple[str, Iterator[Item]]]


@dataclass(frozen=True, slots=True)
class Findings:
    """Checks and figures so far; grows as each group reports.

    Attributes:
        seed: seed of all random inputs.
        begun: names of groups that do not begin again.
        broken: names of begun groups that did not finish.
        late: groups for which there was no time.
    """

    seed: int
    checks: list["Check"] = field(default_factory=list)
    figures: list["Figure"] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> "Findings":
        """Reads a file that `write` wrote; groups that were late may now begin."""
        # Imported here, since both import Triton, which must know before whether to interpret.
        from bench.gpu_checks import Check
        from bench.gpu_figures import Figure

        values = json.loads(path.read_text())
        return cls(
            values["seed"],
            [Check(**_only(Check, each)) for each in values["checks"]],
            [Figure(**_only(Figure, each)) for each in values["figures"]],
            values["begun"],
            values["stopped_by_an_error"],
        )

    def begin(self, group: str) -> None:
        """Marks a group as broken until it ends."""
        self.begun.append(group)
        self.broken.append(group)

    def end(self, group: str) -> None:
        self.broken.remove(group)

    def write(self, path: Path, header: Mapping[str, Any]) -> None:
        """Replaces the file as a whole, or leaves the old one."""
        result = {
            **header,
            "seed": self.seed,
            "checks": [asdict(check) | {"passed": check.passed} for check in self.checks],
            "begun": self.begun,
            "stopped_by_an_error": self.broken,
            "no_time_left": self.late,
            "figures": [asdict(figure) | {"share": figure.share} for figure in self.figures],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text(json.dumps(result, indent=2) + "\n")
        unfinished.replace(path)


def _only(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, without values that were computed from them."""
    return {each.name: values[each.name] for each in fields(kind)}


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
