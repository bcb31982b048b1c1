"""What the policy `fair` promises, in numbers: of two tenants whose requests wait all through some time, neither gets
much more than the other. Counted here anew, from the plans of steps."""

from collections import Counter
from dataclasses import dataclass, field

from scheduler_svc.core.policy import SAMPLE_WEIGHT

_SLACK = 1.1
"""A sampled token counts a little less here where it is the first of its sequence."""


class UnfairError(AssertionError):
    """A tenant got more than its share."""


@dataclass(slots=True)
class Shares:
    """The service that tenants got while they waited.

    Attributes:
        max_num_rows, max_len: Of a worker, and of a sequence. The policy's docstring derives the bound from them.
    """

    max_num_rows: int
    max_len: int
    _served: Counter[str] = field(default_factory=Counter[str])
    _since: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def serve(self, amounts: dict[str, int]) -> None:
        """A step was planned that computes and samples so many tokens of each tenant."""
        self._served.update(amounts)

    def observe(self, waiting: frozenset[str], num_preemptions: int) -> None:
        """These tenants wait now. What is computed again after a preemption counts again.

        Raises:
            UnfairError: one got too much more than another.
        """
        lead: dict[tuple[str, str], int] = {}
        for tenant in waiting:
            for other in waiting - {tenant}:
                # The lead when both began to wait, less what each preemption since then may add.
                now = self._served[tenant] - self._served[other] - self.max_len * num_preemptions * self.max_num_rows
                lead[tenant, other] = self._since.get((tenant, other), now)
                bound = 2 * SAMPLE_WEIGHT * self.max_num_rows * self.max_len * _SLACK
                if now - lead[tenant, other] > bound:
                    raise UnfairError(
                        f"{tenant} got {now - lead[tenant, other]} tokens more than {other}: over {bound}"
                    )
        self._since = lead
