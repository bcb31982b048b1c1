import pytest
import torch

from quire_kernels import ops
from quire_kernels.backends import Implementation
from tests.support.cpu_kernels import IMPLEMENTATION_PARAMS, make_implementation


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every run draws the same numbers: a test must not fail once in a thousand runs."""
    torch.manual_seed(0)


@pytest.fixture(params=IMPLEMENTATION_PARAMS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Implementation:
    """Each implementation that this machine has for the CPU, in turn; `quire_kernels.ops` uses it."""
    chosen = make_implementation(request.param)

    def choose(device: torch.device) -> Implementation:
        assert device.type == "cpu"
        return chosen

    monkeypatch.setattr(ops, "implementation_for", choose)
    return chosen
