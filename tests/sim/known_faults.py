"""Known faults, put back one at a time: the worlds must find each of them.

`python -m tests.sim.known_faults [NAME...] [--worlds 1000] [--first 0]` runs worlds from the first seed on until one
fails, and prints a row of docs/internals/known_faults.md for each fault. Worlds that also fail without the fault do not
count. Worlds that never reach the lines that a fault changes are not run with it. A patch of known_faults.diff that no
longer applies fails loudly: write the fault anew for the present code.
"""

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.sim.mutation import Patch, Reach, patched
from tests.sim.worlds import draw_plan, run_world

_TABLE = Path(__file__).with_name("known_faults.diff")


@dataclass(frozen=True, slots=True)
class KnownFault:
    """A fault of the product.

    Attributes:
        what: A description of the fault, for people.
        was_there: Whether the product once had it; else it was written by hand.
    """

    name: str
    what: str
    patches: tuple[Patch, ...]
    was_there: bool = False


def read_faults(table: str) -> Iterator[KnownFault]:
    """Reads the faults of a table: `# NAME (ORIGIN): WHAT`, then for each change the module after `---` and a hunk of a
    diff, whose context only needs to make it unique."""
    for name, origin, what, changes in re.findall(r"^# (\S+) \((.*?)\): (.*)\n((?:(?!# ).*\n)*)", table, re.MULTILINE):
        hunks = [hunk.rstrip("\n").split("\n") for hunk in changes.split("--- ")[1:]]
        patches = [Patch(module, _side(lines, "+"), _side(lines, "-")) for module, *lines in hunks]
        yield KnownFault(name, what, tuple(patches), origin == "was there")


def _side(lines: Sequence[str], other: str) -> str:
    """The text of one side of a hunk: all lines that do not begin with `other`."""
    return "".join(f"{line[1:]}\n" for line in lines if not line.startswith(other))


FAULTS = tuple(read_faults(_TABLE.read_text()))


@dataclass(frozen=True, slots=True)
class Found:
    """The first world that finds a fault, and the error that shows it.

    Attributes:
        num_worlds: Number of worlds that reached the changed lines and ran with the fault, this one included.
        seconds: Processor time of these worlds.
        how: The error with which the world failed.
    """

    seed: int
    num_worlds: int
    seconds: float
    how: str


def find(faults: Sequence[KnownFault], seeds: Iterable[int]) -> Iterator[tuple[KnownFault, Found]]:
    """Runs worlds with each fault until one fails that does not fail without it. Yields each result as it is found.

    Raises StalePatchError.
    """
    left, num_worlds = list(faults), Counter[str]()
    seconds = dict.fromkeys((fault.name for fault in faults), 0.0)
    with Reach(patch for fault in faults for patch in fault.patches) as reach:
        for seed in seeds:
            if not left:
                return
            own, reached = _problem_of(seed), reach.take()
            if own is not None:
                print(f"world {seed} fails without any fault: {own}", file=sys.stderr)
                continue
            for fault in [each for each in left if not reached.isdisjoint(each.patches)]:
                started = time.process_time()
                with patched(*fault.patches):
                    how = _problem_of(seed)
                seconds[fault.name] += time.process_time() - started
                num_worlds[fault.name] += 1
                if how is not None:
                    left.remove(fault)
                    yield fault, Found(seed, num_worlds[fault.name], seconds[fault.name], how)


def _problem_of(seed: int) -> str | None:
    """The name of the error with which a world fails; None if it passes."""
    try:
        run_world(draw_plan(seed))
    except Exception as error:
        return type(error.__cause__ or error).__name__
    return None


def main(argv: list[str]) -> int:
    """Prints a table row for each fault; returns 1 if a fault is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.known_faults")
    parser.add_argument("names", nargs="*", help="faults to look for; all by default")
    parser.add_argument("--worlds", type=int, default=1000, help="how many worlds to run at most for each")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - {fault.name for fault in FAULTS}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    faults = [fault for fault in FAULTS if not arguments.names or fault.name in arguments.names]
    missed = {fault.name: fault for fault in faults}
    for fault, found in find(faults, range(arguments.first, arguments.first + arguments.worlds)):
        del missed[fault.name]
        print(_row(fault, f"{found.seed} | {found.num_worlds} | {found.seconds:.1f} | `{found.how}`"), flush=True)
    for fault in missed.values():
        print(_row(fault, f"not in {arguments.worlds} worlds | | |"))
    return 1 if missed else 0


def _row(fault: KnownFault, told: str) -> str:
    return f"| `{fault.name}` | {'was there' if fault.was_there else 'made'} | {told} |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
