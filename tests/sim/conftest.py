"""`pytest tests/sim --seed N --worlds M` runs M worlds from seed N on, some in each test."""

from collections.abc import Sequence

import pytest

_WORLDS_A_TEST = 10
_CHOSEN = (
    *(2, 6, 7, 10, 11, 13, 14, 16, 17, 18, 20, 21, 23, 25, 37, 38, 39, 40, 48, 49),
    *(52, 55, 57, 60, 62, 66, 68, 70, 72, 75, 79, 80, 83, 87, 88, 89, 93, 95, 96, 99),
)
"""Seeds from the first 100. Their worlds cover 99 % of the service branches that all 100 worlds cover, in a third of
the time (ADR 28)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="the first world's seed")
    parser.addoption("--worlds", type=int, help="how many worlds to run (default: 40 chosen ones)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The flags do not exist if pytest is started for other folders, too."""
    if "seeds" in metafunc.fixturenames:
        first = int(metafunc.config.getoption("--seed", default=0) or 0)
        count: int | None = metafunc.config.getoption("--worlds", default=None)
        seeds: Sequence[int] = range(first, first + (count or 100)) if first or count else _CHOSEN
        parts = [seeds[start : start + _WORLDS_A_TEST] for start in range(0, len(seeds), _WORLDS_A_TEST)]
        metafunc.parametrize("seeds", parts, ids=[f"{part[0]}-{part[-1]}" for part in parts])
