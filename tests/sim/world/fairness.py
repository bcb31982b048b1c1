"""The guarantee of the policy `fair`, in numbers: if the requests of two tenants wait for some time without a break,
neither tenant gets much more service than the other. It is counted here independently, from the plans of steps.

The policy's docstring derives the bound. A sequence that enters the batch is still to get at most

    PREFILL_WEIGHT * (its prompt) + SAMPLE_WEIGHT * (its max_tokens),

and no more than max_num_seqs run. So a tenant f leads another one g by at most U_f, the sum of the max_num_seqs largest
of these costs, at any time at which both wait. While they do, its lead grows by at most U_f + U_g. Recomputed tokens
add to that: tokens of f since both wait, and all tokens of g, since these may have increased its own lead before.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler_svc.core.policy import PREFILL_WEIGHT, SAMPLE_WEIGHT
from scheduler_svc.core.request import Request, RequestKey
from scheduler_svc.core.running_batch import RowTable
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import Usage

_MAX_STEPS_IN_FLIGHT = 4
"""Maximum steps in flight of any worker: their samples are drawn again if a group leaves the batch."""


class UnfairError(AssertionError):
    """A tenant got more than its share."""


@dataclass(slots=True)
class Shares:
    """The service that tenants got while they waited.

    Attributes:
        max_num_seqs: Maximum number of sequences that run at once.
    """

    max_num_seqs: int
    _costs: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Costs of each tenant's sequences, the most costly ones first."""
    _served: Counter[str] = field(default_factory=Counter[str])
    _again: Counter[str] = field(default_factory=Counter[str])
    """Cost of each tenant's tokens that may be computed again."""
    _since: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])

    def arrives(self, request: Request) -> None:
        """A request arrives, from a client or for a pin."""
        costs = self._costs[request.tenant]
        cost = PREFILL_WEIGHT * len(request.prompt) + SAMPLE_WEIGHT * request.max_tokens
        costs += [cost] * request.num_sequences
        costs.sort(reverse=True)
        del costs[self.max_num_seqs :]

    def serve(self, computed: Counter[str], sampled: Counter[str]) -> None:
        """A step was planned that computes and samples these numbers of tokens for each tenant."""
        for tenant, count in computed.items():
            self._served[tenant] += PREFILL_WEIGHT * count
        for tenant, count in sampled.items():
            self._served[tenant] += SAMPLE_WEIGHT * count

    def leaves(self, group: SequenceGroup) -> None:
        """A group leaves the batch before it has ended."""
        for sequence in group.unfinished:
            drawn_again = SAMPLE_WEIGHT * _MAX_STEPS_IN_FLIGHT
            self._again[group.request.tenant] += PREFILL_WEIGHT * sequence.num_tokens + drawn_again

    def observe(self, waiting: frozenset[str]) -> None:
        """Records that these tenants wait now.

        Raises:
            UnfairError: a tenant got too much more than another.
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


@dataclass(slots=True)
class Bills:
    """The charges of the policy `fair` to each tenant since its core began, and the cost of its requests. The cost is
    counted from the tokens that they had to compute when they entered the batch and from the tokens that they
    generated, not from the plans of steps.

    Attributes:
        charged: The increase of each tenant's counter for steps.
    """

    charged: Counter[str] = field(default_factory=Counter[str])
    _least: Counter[str] = field(default_factory=Counter[str])
    _most: Counter[str] = field(default_factory=Counter[str])
    _entries: dict[RequestKey, list[tuple[int, int]]] = field(default_factory=dict[RequestKey, list[tuple[int, int]]])
    """For each entry of a request into the batch, the numbers of tokens to compute and of tokens generated before."""

    def enters(self, group: SequenceGroup, table: RowTable) -> None:
        """A group has just got rows, and none of its tokens is planned."""
        rows = [each.row for each in group.computing if each.row is not None]
        to_compute = sum(map(table.num_uncomputed, rows))
        num_left = sum(group.request.max_len - each.num_tokens for each in group.unfinished)
        num_before = sum(each.num_output_tokens for each in group.sequences)
        self._entries.setdefault(group.request.key, []).append((to_compute, num_before))
        self._most[group.request.tenant] += PREFILL_WEIGHT * to_compute + SAMPLE_WEIGHT * num_left

    def leaves(self, group: SequenceGroup) -> None:
        """A group leaves the batch before it has ended. Only the steps in flight are computed again."""
        drawn_again = PREFILL_WEIGHT + SAMPLE_WEIGHT * _MAX_STEPS_IN_FLIGHT
        self._most[group.request.tenant] += drawn_again * len(group.unfinished)

    def ends(self, request: Request, usage: Usage) -> None:
        """A request is completed. One that was computed in parts, with a pause between them, may have cost less."""
        entries = self._entries.pop(request.key, [])
        if len(entries) == 1 and not usage.preemptions:
            ((to_compute, num_before),) = entries
            num_generated = 0 if request.beam is not None else usage.generated_tokens - num_before
            self._least[request.tenant] += PREFILL_WEIGHT * to_compute + SAMPLE_WEIGHT * num_generated

    def wrong(self) -> Iterator[str]:
        """Tenants that paid less or more than their requests cost. Call it only if no request is live."""
        for tenant, most in self._most.items():
            least, charged = self._least[tenant], self.charged[tenant]
            if not least <= charged <= most:
                yield f"{tenant} was charged {charged} for steps, not {least} to {most}"
