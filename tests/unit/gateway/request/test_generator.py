"""How many prompts may be prepared at once, and what refused prompts get back."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.auth.quota import Refund
from gateway.request.generator import MAX_PREPARED, Preparations, _refund
from quire.rpc.errors import ResourceExhausted


def refusal(preparations: Preparations, tenant: str) -> str:
    with pytest.raises(ResourceExhausted) as raised, preparations.counted(tenant, 1):
        pass
    assert raised.value.retry_after_ms
    return raised.value.message


def test_a_tenant_prepares_half_of_what_all_may_and_one_call_in_any_case():
    preparations = Preparations()
    with preparations.counted("a", MAX_PREPARED // 2), preparations.counted("b", 1):
        assert "2,048 prompts of this tenant's calls are prepared" in refusal(preparations, "a")
        with preparations.counted("b", MAX_PREPARED // 2 - 1), preparations.counted("c", 1024):
            assert "5,120 of all" in refusal(preparations, "c")
    with preparations.counted("a", 1), preparations.counted("a", 1):
        pass


@pytest.mark.parametrize(
    ("may_have_run", "has_failed", "refund"),
    [
        (False, True, Refund.ALL),
        (False, False, Refund.PROMPT),
        # It ends with another request of its call, or by a refusal after it ran.
        (True, False, Refund.NOTHING),
        (True, True, Refund.NOTHING),
    ],
)
def test_what_may_have_run_is_not_refunded(may_have_run, has_failed, refund):
    live = SimpleNamespace(may_have_run=may_have_run, has_failed=has_failed)
    assert _refund(cast(Any, live), ResourceExhausted("full")) is refund
