"""Findings of a run of `bench.gpu` so far, and their file, from which another run continues."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.gpu_checks import Check
    from bench.gpu_figures import Figure


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
