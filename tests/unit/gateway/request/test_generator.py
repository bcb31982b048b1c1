"""How many prompts may be prepared at once."""

import pytest

from gateway.request.generator import MAX_PREPARED, Preparations
from quire.rpc.errors import ResourceExhausted


def refusal(preparations: Preparations, tenant: str) -> str:
    with pytest.raises(ResourceExhausted) as raised, preparations.hold(tenant, 1):
        pass
    assert raised.value.retry_after_ms
    return raised.value.message


def test_a_tenant_prepares_half_of_what_all_may_and_one_call_in_any_case():
    preparations = Preparations()
    with preparations.hold("a", MAX_PREPARED // 2), preparations.hold("b", 1):
        assert "2,048 prompts of this tenant's calls are prepared" in refusal(preparations, "a")
        with preparations.hold("b", MAX_PREPARED // 2 - 1), preparations.hold("c", 1024):
            assert "5,120 of all" in refusal(preparations, "c")
    with preparations.hold("a", 1), preparations.hold("a", 1):
        pass
