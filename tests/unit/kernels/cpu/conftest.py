import pytest

from tests.support.cpu_kernels import ISA_PARAMS


@pytest.fixture(scope="module", params=ISA_PARAMS)
def isa(request: pytest.FixtureRequest) -> str:
    """Each instruction set in turn."""
    return request.param
