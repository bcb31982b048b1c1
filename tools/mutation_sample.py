"""Changes code in small ways, one at a time, and prints the changes that no test finds.

    python -m tools.mutation_sample scheduler_svc/core tests/unit/scheduler_svc/core --exclude invariants

Places in the code are drawn with a fixed seed, and each is changed by one of cosmic-ray's operators. The test files run
one after the other until one fails, the most successful ones first; then a chosen number of simulated worlds. Modules
are changed in place and restored, so nothing else may use the checkout meanwhile. `make test-mutation` installs
cosmic-ray, which nothing else needs.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import re
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import hypothesis.stateful  # noqa: F401  (imports of the tests are loaded once, before the forks)
import pytest
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_item import MutationSpec
from hypothesis import settings
from hypothesis.internal.conjecture import engine

_OPERATORS = ("AddNot", "NumberReplacer", "Replace", "ZeroIteration")
# `|` makes unions of types, and `is` compares with None: with another operator the module raises as soon as it runs.
_EXCLUDED = re.compile("_BitOr_|_Is_(Eq|NotEq|Lt|Gt)|_IsNot_(Eq|NotEq|Lt|Gt)")

_CPU_SECONDS, _MEMORY = 60, 8 << 30
"""Limits of one test file or world: a change may make a loop endless."""
_WORLDS = "worlds"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("tests", type=Path)
    parser.add_argument("--exclude", nargs="*", default=[], help="names of modules that are not changed")
    parser.add_argument("--sample", type=int, default=80, help="how many places are changed")
    parser.add_argument("--first", type=int, default=1, help="the number of the first of them that this run changes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worlds", type=int, default=0, help="how many worlds look for what no test finds")
    arguments = parser.parse_args()
    modules = [path for path in sorted(arguments.package.rglob("*.py")) if path.stem not in arguments.exclude]
    found_by = Counter({str(path): 0 for path in sorted(arguments.tests.rglob("test_*.py"))})
    # A changed module must not be cached: it may have the size and time stamp of the next one.
    sys.dont_write_bytecode = True
    # The same examples for each change, and none after the first that fails. Profiles of the tests inherit it.
    settings.register_profile("sample", derandomize=True, database=None, deadline=None, report_multiple_bugs=False)
    settings.load_profile("sample")
    if broken := _first_failing(list(found_by), arguments.worlds):
        print(f"{broken} fails without any change")
        return 1
    sample = _draw(modules, arguments.sample, random.Random(arguments.seed))[arguments.first - 1 :]
    for number, mutation in enumerate(sample, arguments.first):
        original = mutation.module_path.read_text()
        written = mutation.module_path.stat()
        changed = mutate_code(original, get_operator(mutation.operator_name)(), mutation.occurrence)
        try:
            mutation.module_path.write_text(changed)
            found = _first_failing([path for path, _ in found_by.most_common() if path != _WORLDS], arguments.worlds)
        finally:
            mutation.module_path.write_text(original)
            os.utime(mutation.module_path, ns=(written.st_atime_ns, written.st_mtime_ns))
        if found:
            found_by[found] += 1
        line, name = mutation.start_pos[0], mutation.operator_name.removeprefix("core/")
        print(f"{number}: {mutation.module_path}:{line} {name}: {found or 'NOT FOUND'}", flush=True)
        if not found:
            print(*(f"    {code.splitlines()[line - 1].strip()}" for code in (original, changed)), sep="\n", flush=True)
    low, high = _interval(found_by.total(), len(sample))
    print(f"{found_by.total()} of {len(sample)} changes found, {low:.0%} to {high:.0%} of all (95% interval)")
    return 0


def _draw(modules: list[Path], size: int, generator: random.Random) -> list[MutationSpec]:
    """Different places, each with one of the changes that can be made there."""
    changes: dict[tuple[Path, tuple[int, int]], list[MutationSpec]] = defaultdict(list)
    for item in _all_work_items(modules, {}):
        (mutation,) = item.mutations
        name = mutation.operator_name.removeprefix("core/")
        line = mutation.module_path.read_text().splitlines()[mutation.start_pos[0] - 1]
        if name.startswith(_OPERATORS) and not _EXCLUDED.search(name) and not line.lstrip().startswith("@dataclass"):
            changes[mutation.module_path, mutation.start_pos].append(mutation)
    print(f"{len(changes)} places in {len(modules)} modules", flush=True)
    return [generator.choice(changes[place]) for place in generator.sample(sorted(changes), min(size, len(changes)))]


def _first_failing(files: list[str], num_worlds: int) -> str | None:
    if failing := next((file for file in files if _fails(_run, file)), None):
        return failing
    return _WORLDS if num_worlds and _fails(_run_worlds, num_worlds) else None


def _fails(run: Callable[[Any], int], argument: object) -> bool:
    """Whether it fails, or does not end, in a process of its own, which imports the changed module."""
    process = multiprocessing.get_context("fork").Process(target=_in_silence, args=(run, argument))
    process.start()
    process.join()
    return bool(process.exitcode)


def _in_silence(run: Callable[[Any], int], argument: object) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    with (
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        os._exit(run(argument))


def _run(file: str) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    # The smallest example is not needed.
    engine.MAX_SHRINKING_SECONDS = 0
    # No limit by the clock: on a busy machine a test that finds nothing would seem to have found the change.
    arguments = [file, "-q", "-x", "--timeout", "0", "-p", "no:cacheprovider"]
    return pytest.main([*arguments, "-W", "ignore::pytest.PytestAssertRewriteWarning"])


def _run_worlds(count: int) -> int:
    from tests.sim.worlds import draw_plan, run_world

    for seed in range(count):
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + _CPU_SECONDS, resource.RLIM_INFINITY))
        try:
            run_world(draw_plan(seed))
        except Exception:
            return 1
    return 0


def _interval(hits: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's."""
    share, extra = hits / total, z * z / total
    middle, half = share + extra / 2, z * sqrt(share * (1 - share) / total + extra / total / 4)
    return (middle - half) / (1 + extra), (middle + half) / (1 + extra)


if __name__ == "__main__":
    sys.exit(main())
