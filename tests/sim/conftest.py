"""`pytest tests/sim --seed N --worlds M` runs M worlds from seed N on."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=0, help="the first world's seed")
    parser.addoption("--worlds", type=int, default=20, help="how many worlds to run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where pytest is started for other folders too, the flags do not exist."""
    if "seed" in metafunc.fixturenames:
        first = int(metafunc.config.getoption("--seed", default=0) or 0)
        count = int(metafunc.config.getoption("--worlds", default=20) or 20)
        metafunc.parametrize("seed", range(first, first + count))
