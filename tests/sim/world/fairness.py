"""What the policy `fair` promises, in numbers: of two tenants whose requests wait all through some time, neither gets
much more service than the other. Counted here anew, from the plans of steps.

The policy's docstring derives the bound. A sequence that enters the batch is still to get at most

    PREFILL_WEIGHT * (its prompt) + SAMPLE_WEIGHT * (its max_tokens),

and no more than max_num_seqs run. So a tenant f leads another one g by at most U_f, the sum of the max_num_seqs largest
of these, at any time at which both wait. While they do, its lead grows by at most U_f + U_g. What is computed again
adds to that: of f since both wait, and of g since the beginning, since that may have made its own lead larger before.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from scheduler_svc.core.policy import PREFILL_WEIGHT, SAMPLE_WEIGHT
from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import SequenceGroup

_MAX_STEPS_IN_FLIGHT = 4
"""Of any worker: their samples are drawn again where a group leaves the batch."""


class UnfairError(AssertionError):
    """A tenant got more than its share."""


@dataclass(slots=True)
class Shares:
    """The service that tenants got while they waited.

    Attributes:
        max_num_seqs: How many sequences run at once.
    """

    max_num_seqs: int
    _costs: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """What sequences of each tenant get, the most costly ones first."""
    _served: Counter[str] = field(default_factory=Counter[str])
    _again: Counter[str] = field(default_factory=Counter[str])
    """What may be computed again, of each tenant."""
    _since: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def arrives(self, request: Request) -> None:
        """A request comes, or a pin's."""
        costs = self._costs[request.tenant]
        cost = PREFILL_WEIGHT * len(request.prompt) + SAMPLE_WEIGHT * request.max_tokens
        costs += [cost] * request.num_sequences
        costs.sort(reverse=True)
        del costs[self.max_num_seqs :]

    def serve(self, computed: Counter[str], sampled: Counter[str]) -> None:
        """A step was planned that computes so many tokens of prompts, and samples so many, of each tenant."""
        for tenant, count in computed.items():
            self._served[tenant] += PREFILL_WEIGHT * count
        for tenant, count in sampled.items():
            self._served[tenant] += SAMPLE_WEIGHT * count

    def leaves(self, group: SequenceGroup) -> None:
        """A group leaves the batch before its end."""
        for sequence in group.unfinished:
            drawn_again = SAMPLE_WEIGHT * _MAX_STEPS_IN_FLIGHT
            self._again[group.request.tenant] += PREFILL_WEIGHT * sequence.num_tokens + drawn_again

    def observe(self, waiting: frozenset[str]) -> None:
        """These tenants wait now.

        Raises:
            UnfairError: one got too much more than another.
        """
        lead: dict[tuple[str, str], int] = {}
        for tenant in waiting:
            for other in waiting - {tenant}:
                now = self._served[tenant] - self._again[tenant] - self._served[other]
                lead[tenant, other] = self._since.get((tenant, other), now)
                bound = sum(self._costs[tenant]) + sum(self._costs[other]) + self._again[other]
                if now - lead[tenant, other] > bound:
                    raise UnfairError(f"{tenant} got {now - lead[tenant, other]} more than {other}: over {bound}")
        self._since = lead
