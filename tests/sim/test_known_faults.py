"""Worlds find the faults that they exist for: known faults are put back, each found by a seed from
docs/internals/known_faults.md."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.core.running_batch import RowTable
from tests.sim.known_faults import FAULTS, find
from tests.sim.mutation import Patch, StalePatchError, patched
from tests.sim.shrink import WorldFailedError, check_world
from tests.sim.world.world import collect_worlds
from tests.sim.worlds import draw_plan
from tests.support.tiers import is_third_tier

_TABLE = Path(__file__).parents[2] / "docs/internals/known_faults.md"
_BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.fixture(autouse=True)
def failed_worlds_are_freed() -> Iterator[None]:
    """The error of a world that failed keeps it until the test is over."""
    yield
    collect_worlds()


def test_patches_apply_to_what_stands_there() -> None:
    """If a patch does not apply, the code has changed: write the fault anew for it, and search its seed."""
    stale = dict[str, str]()
    for fault in FAULTS:
        try:
            with patched(*fault.patches):
                pass
        except StalePatchError as error:
            stale[fault.name] = str(error)
    assert not stale


def test_a_patch_is_gone_after_its_block() -> None:
    before = RowTable.without_slot.__code__
    with patched(*_BY_NAME["slot-off-by-one"].patches):
        assert RowTable.without_slot.__code__ is not before
    assert RowTable.without_slot.__code__ is before


def test_a_patch_of_what_is_no_longer_there_is_stale() -> None:
    with pytest.raises(StalePatchError, match="0 times"), patched(Patch(RowTable.__module__, "was there once", "")):
        pass


def test_the_table_has_each_fault() -> None:
    named = re.findall(r"^\| `([^`]+)` \|", _TABLE.read_text(), re.MULTILINE)
    assert sorted(named) == sorted(_BY_NAME)


# Faults in blocks, streams between services, ranks, and text.
_SHOWN = [
    ("dropped-copy", 0),
    ("epoch-compared-with-ge", 14),
    ("credit-ignored", 2),
]
_OTHERS = [
    ("released-row", 0),
    ("ranks-not-compared", 29),
]
_ALL = [
    (name, int(seed))
    for name, seed in re.findall(r"^\| `([^`]+)` \|[^|]*\| (\d+) \|", _TABLE.read_text(), re.MULTILINE)
]
_MORE = [each for each in (_ALL if is_third_tier() else _OTHERS) if each not in _SHOWN]


@pytest.mark.parametrize(
    ("name", "seed"), [*_SHOWN, *(pytest.param(*each, marks=pytest.mark.extended) for each in _MORE)]
)
def test_a_world_finds(name: str, seed: int) -> None:
    assert [found.seed for _, found in find([_BY_NAME[name]], [seed])] == [seed]


def test_a_failing_world_tells_a_short_story() -> None:
    plan = draw_plan(0)
    with patched(*_BY_NAME["dropped-copy"].patches), pytest.raises(WorldFailedError) as told:
        check_world(plan)
    story = str(told.value)
    assert f"of {len(plan.requests)} requests" in story
    assert "what happened:" in story
    assert story.count("Generate(") < len(plan.requests)
    assert re.search(r"s  failed worker-\d#\d", story)
