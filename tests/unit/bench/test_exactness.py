"""The price of exactness: patches that switch promises off still apply, and both sides run."""

from collections import Counter
from collections.abc import Iterator
from types import CodeType

import pytest

from bench import exactness
from scheduler_svc.core.policy import FairPolicy
from tests.sim.mutation import patched


@pytest.mark.parametrize("name", exactness.PATCHES)
def test_each_patch_applies_to_the_code_and_is_taken_back(name: str) -> None:
    assert name in exactness.PARTS
    for _ in range(2):
        with patched(*exactness.PATCHES[name]):
            pass


def test_rounds_alternate_and_ratios_are_of_one_round() -> None:
    order = list[str]()

    def side(name: str, rate: float) -> float:
        order.append(name)
        return rate * len(order)

    ratios, _ = exactness.alternate(lambda: side("on", 1.0), lambda: side("off", 1.0), 0.0)
    assert order[2:6] == ["on", "off", "off", "on"] or order[2:6] == ["off", "on", "on", "off"]
    assert len(ratios) * 2 + 2 == len(order)


def test_half_of_the_steps_of_a_round_run_patched() -> None:
    codes = Counter[CodeType]()

    def step() -> Iterator[None]:
        while True:
            codes[FairPolicy.charge.__code__] += 1
            yield

    own = FairPolicy.charge.__code__
    ratios, _ = exactness.alternate_steps(lambda: (run := step(), run), exactness.PATCHES["fairness"], 0.0)
    assert len(codes) == 2
    assert codes[own] > codes.total() - codes[own] == len(ratios) * 16
    assert FairPolicy.charge.__code__ is own
