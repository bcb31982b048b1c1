"""The order in which workers serve tenants that wait for preparations."""

from collections.abc import Sequence

from scheduler_svc.core.preparation import Preparations
from scheduler_svc.core.request import Constraint, Need


class Turns:
    """The time since which each tenant waits for a preparation, or of its last turn."""

    def __init__(self) -> None:
        self._since = dict[str, int]()
        self._now = 0

    def wanted(self, preparations: Preparations) -> dict[str, list[Need]]:
        """Records the waiting tenants. Call it after each operation. Returns the needs that each tenant waits for;
        empty if one of them is a suspect, which goes before all others."""
        self._now += 1
        wanted = preparations._wanted
        self._since = {tenant: self._since.get(tenant, self._now) for tenant in wanted}
        known = {each.need for each in preparations._underway.values()}
        if any(preparations.trials.is_suspect(need) for needs in (known, *wanted.values()) for need in needs):
            return {}
        return {
            tenant: [need for need in needs if not preparations._is_known(need)] for tenant, needs in wanted.items()
        }

    def wrong(self, wanted: dict[str, list[Need]], begun: Sequence[Need]) -> str | None:
        """The error in the order in which these preparations begin; None if it is right."""
        for need in begun:
            if waiting := [tenant for tenant, needs in wanted.items() if need in needs]:
                first = min(waiting, key=self._since.__getitem__)
                passed = [
                    tenant
                    for tenant, needs in wanted.items()
                    if self._since[tenant] < self._since[first]
                    and any(isinstance(each, Constraint) and each not in begun for each in needs)
                ]
                if passed and isinstance(need, Constraint):
                    return f"{first} has its turn before {passed}"
                self._now += 1
                self._since[first] = self._now
        return None
