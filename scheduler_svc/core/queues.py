"""Where sequence groups wait and run."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, KeysView

from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import SequenceGroup


class GroupQueue:
    """Groups in order of their rank, lowest first, and those of one tenant likewise.

    Ranks are unique; the policy gives them (see `policy`). Searching costs O(log n); putting in and taking out moves
    the machine words behind the place.
    """

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self._by_rank: dict[int, SequenceGroup] = {}
        self._by_key: dict[RequestKey, SequenceGroup] = {}
        self._of_tenant: dict[str, list[int]] = {}
        self._tokens: dict[RequestKey, int] = {}
        self._tokens_of_tenant: Counter[str] = Counter()
        self.num_tokens = 0
        """Tokens that all groups have to compute, at the time when they were put in, if none is cached."""
        self.num_changes = 0
        """How often a group was put in or taken out."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (self._by_rank[rank] for rank in self._ranks)

    def __reversed__(self) -> Iterator[SequenceGroup]:
        return (self._by_rank[rank] for rank in reversed(self._ranks))

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def get(self, key: RequestKey) -> SequenceGroup:
        """KeyError where it is not here."""
        return self._by_key[key]

    def first(self) -> SequenceGroup:
        """The group with the lowest rank."""
        return self._by_rank[self._ranks[0]]

    def last(self) -> SequenceGroup:
        """The group with the highest rank."""
        return self._by_rank[self._ranks[-1]]

    def tenants(self) -> KeysView[str]:
        """Those who have a group here."""
        return self._of_tenant.keys()

    def num_of(self, tenant: str) -> int:
        """How many groups the tenant has here."""
        return len(self._of_tenant.get(tenant, ()))

    def num_tokens_of(self, tenant: str) -> int:
        """`num_tokens` of the tenant's groups."""
        return self._tokens_of_tenant[tenant]

    def first_of(self, tenant: str) -> SequenceGroup:
        """The tenant's group with the lowest rank."""
        return self._by_rank[self._of_tenant[tenant][0]]

    def last_of(self, tenant: str) -> SequenceGroup:
        """The tenant's group with the highest rank."""
        return self._by_rank[self._of_tenant[tenant][-1]]

    def add(self, group: SequenceGroup) -> None:
        """Puts a group in that is not here."""
        key = group.request.key
        insort(self._ranks, group.rank)
        insort(self._of_tenant.setdefault(group.request.tenant, []), group.rank)
        self._by_rank[group.rank] = self._by_key[key] = group
        self.num_changes += 1
        self._tokens[key] = group.num_tokens_to_compute
        self.num_tokens += self._tokens[key]
        self._tokens_of_tenant[group.request.tenant] += self._tokens[key]

    def remove(self, key: RequestKey) -> SequenceGroup:
        """Takes a group out and returns it. KeyError where it is not here."""
        group = self._by_key.pop(key)
        del self._by_rank[group.rank]
        self.num_changes += 1
        _take_out(self._ranks, group.rank)
        tenant = group.request.tenant
        _take_out(self._of_tenant[tenant], group.rank)
        num_tokens = self._tokens.pop(key)
        self.num_tokens -= num_tokens
        self._tokens_of_tenant[tenant] -= num_tokens
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant], self._tokens_of_tenant[tenant]
        return group


def _take_out(ranks: list[int], rank: int) -> None:
    del ranks[bisect_left(ranks, rank)]
