"""Time by part."""

import pytest

from bench.parts import Part, PartTimes


class _Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class _Kitchen:
    def __init__(self, clock: _Clock) -> None:
        self.clock = clock

    def cook(self) -> str:
        self.clock.pass_by(1.0)
        self.chop()
        self.chop()
        return "soup"

    def chop(self) -> None:
        self.clock.pass_by(0.25)

    def burn(self) -> None:
        self.clock.pass_by(2.0)
        raise RuntimeError("burnt")


_PARTS = (Part("cooking", _Kitchen, "cook"), Part("chopping", _Kitchen, "chop"), Part("burning", _Kitchen, "burn"))


def test_time_of_an_inner_part_does_not_count_for_the_outer_one() -> None:
    clock = _Clock()
    times = PartTimes(clock)
    with times.measure(_PARTS):
        assert _Kitchen(clock).cook() == "soup"
    assert times.seconds == {"cooking": 1.0, "chopping": 0.5}


def test_a_part_that_raises_is_counted_and_the_error_passes() -> None:
    clock = _Clock()
    times = PartTimes(clock)
    with times.measure(_PARTS), pytest.raises(RuntimeError, match="burnt"):
        _Kitchen(clock).burn()
    assert times.seconds == {"burning": 2.0}


def test_nothing_is_counted_after_the_measurement() -> None:
    clock = _Clock()
    times = PartTimes(clock)
    with times.measure(_PARTS):
        pass
    _Kitchen(clock).cook()
    assert times.seconds == {}


def test_a_part_that_does_not_exist_is_refused() -> None:
    with pytest.raises(AttributeError), PartTimes(_Clock()).measure([Part("serving", _Kitchen, "serve")]):
        pass
