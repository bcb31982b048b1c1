import pytest

from tests.support.request_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
