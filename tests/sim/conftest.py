"""`pytest tests/sim --seed N --worlds M` runs M worlds from seed N on, some in each test."""

from collections.abc import Sequence
from typing import Any

import pytest

_WORLDS_A_TEST = 6
_CHOSEN = (2, 7, 10, 13, 16, 17, 25, 27, 33, 34, 37, 38, 48, 55, 57, 59, 68)
"""Seeds of the first tier: with those of the third one, they cover 97% of the service branches that the worlds of the
first 84 seeds cover (ADR 28)."""
_OTHERS = (6, 20, 23, 39, 62, 66)
"""Seeds of the third tier."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="the first world's seed")
    parser.addoption("--worlds", type=int, help="number of worlds (default: those chosen for the tier)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The flags do not exist if pytest is started for other folders, too."""
    if "seeds" in metafunc.fixturenames:
        first = int(metafunc.config.getoption("--seed", default=0) or 0)
        count: int | None = metafunc.config.getoption("--worlds", default=None)
        if first or count:
            parts = _parts(range(first, first + (count or 100)))
        else:
            parts = _parts(_CHOSEN) + _parts(_OTHERS, pytest.mark.long)
        metafunc.parametrize("seeds", parts)


def _parts(seeds: Sequence[int], *marks: pytest.MarkDecorator) -> list[Any]:
    parts = [seeds[start : start + _WORLDS_A_TEST] for start in range(0, len(seeds), _WORLDS_A_TEST)]
    return [pytest.param(part, marks=marks, id=f"{part[0]}-{part[-1]}") for part in parts]
