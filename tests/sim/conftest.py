"""`pytest tests/sim --seed N --worlds M` runs M worlds from seed N on, some in each test."""

import pytest

_WORLDS_A_TEST = 10


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="the first world's seed")
    parser.addoption("--worlds", type=int, default=100, help="how many worlds to run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where pytest is started for other folders too, the flags do not exist."""
    if "seeds" in metafunc.fixturenames:
        first = int(metafunc.config.getoption("--seed", default=0) or 0)
        count = int(metafunc.config.getoption("--worlds", default=100) or 100)
        parts = [
            range(start, min(start + _WORLDS_A_TEST, first + count))
            for start in range(first, first + count, _WORLDS_A_TEST)
        ]
        metafunc.parametrize("seeds", parts, ids=[f"{part.start}-{part[-1]}" for part in parts])
