"""`pytest tests/sim --seed N --worlds M` runs M worlds from seed N on, some in each test."""

from collections.abc import Sequence
from typing import Any

import pytest

_WORLDS_A_TEST = 6
_CHOSEN = (2, 7, 10, 13, 16, 17, 25, 27, 33, 34, 37, 38, 48, 55, 57, 59, 68)
"""Seeds of the first tier (ADR 28)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="the first world's seed")
    parser.addoption("--worlds", type=int, help="number of worlds (default: the chosen ones)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The flags do not exist if pytest is started for other folders, too."""
    if "seeds" in metafunc.fixturenames:
        first = int(metafunc.config.getoption("--seed", default=0) or 0)
        count: int | None = metafunc.config.getoption("--worlds", default=None)
        seeds = range(first, first + (count or 100)) if first or count else _CHOSEN
        metafunc.parametrize("seeds", _parts(seeds))


def _parts(seeds: Sequence[int]) -> list[Any]:
    parts = [seeds[start : start + _WORLDS_A_TEST] for start in range(0, len(seeds), _WORLDS_A_TEST)]
    return [pytest.param(part, id=f"{part[0]}-{part[-1]}") for part in parts]
