"""Where sequence groups wait and run."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, KeysView

from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import SequenceGroup

_MANY = 32
"""So many groups are taken out of a queue together, which moves the words behind them once."""


class GroupQueue:
    """Groups in order of their rank, lowest first, and those of one tenant likewise.

    Ranks are unique; the policy gives them (see `policy`). Searching costs O(log n); putting in and taking out moves
    the machine words behind the place. A group can be held: it stays here with its rank, and is passed over by `first`,
    `last` and their like until it is let go.
    """

    def __init__(self, on_new_first: Callable[[str, int], None] | None = None) -> None:
        """`on_new_first` is called with a tenant and a rank when a group of this rank becomes the tenant's first."""
        self._on_new_first = on_new_first
        self._ranks: list[int] = []
        self._by_rank: dict[int, SequenceGroup] = {}
        self._by_key: dict[RequestKey, SequenceGroup] = {}
        self._of_tenant: dict[str, list[int]] = {}
        self._tokens: dict[RequestKey, int] = {}
        self._held: set[int] = set()
        self._tokens_of_tenant: Counter[str] = Counter()
        self._num_of_tenant: Counter[str] = Counter()
        self.num_tokens = 0
        """Tokens that all groups have to compute, at the time when they were put in, if none is cached."""
        self.num_changes = 0
        """How often a group was put in or taken out."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[SequenceGroup]:
        ranks = sorted((*self._ranks, *self._held)) if self._held else self._ranks
        return (self._by_rank[rank] for rank in ranks)

    def __reversed__(self) -> Iterator[SequenceGroup]:
        assert not self._held
        return (self._by_rank[rank] for rank in reversed(self._ranks))

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._by_key

    def get(self, key: RequestKey) -> SequenceGroup:
        """KeyError where it is not here."""
        return self._by_key[key]

    def next_few(self, count: int) -> list[SequenceGroup]:
        """The first so many that are not held."""
        return [self._by_rank[rank] for rank in self._ranks[:count]]

    @property
    def has_next(self) -> bool:
        """Whether there is a group that is not held."""
        return bool(self._ranks)

    def is_held(self, key: RequestKey) -> bool:
        return key in self._by_key and self._by_key[key].rank in self._held

    def hold(self, key: RequestKey) -> None:
        """KeyError where it is not here; it must not be held."""
        group = self._by_key[key]
        self._take_out_of_order(group)
        self._held.add(group.rank)

    def let_go(self, key: RequestKey) -> None:
        """A held group has its place again. Nothing happens where it is not here or not held."""
        group = self._by_key.get(key)
        if group is not None and group.rank in self._held:
            self._held.remove(group.rank)
            self._put_in_order(group)

    def let_all_go(self) -> None:
        """No group is held any more."""
        for rank in list(self._held):
            self.let_go(self._by_rank[rank].request.key)

    def first(self) -> SequenceGroup:
        """The group with the lowest rank."""
        return self._by_rank[self._ranks[0]]

    def last(self) -> SequenceGroup:
        """The group with the highest rank."""
        return self._by_rank[self._ranks[-1]]

    def tenants(self) -> KeysView[str]:
        """Those who have a group here."""
        return self._num_of_tenant.keys()

    def tenants_with_next(self) -> KeysView[str]:
        """Those who have a group here that is not held."""
        return self._of_tenant.keys()

    def num_of(self, tenant: str) -> int:
        """How many groups the tenant has here."""
        return self._num_of_tenant[tenant]

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
        self._put_in_order(group)
        self._by_rank[group.rank] = self._by_key[key] = group
        self.num_changes += 1
        self._tokens[key] = group.num_tokens_to_compute
        self.num_tokens += self._tokens[key]
        self._tokens_of_tenant[group.request.tenant] += self._tokens[key]
        self._num_of_tenant[group.request.tenant] += 1

    def remove(self, key: RequestKey) -> SequenceGroup:
        """Takes a group out and returns it. KeyError where it is not here."""
        group = self._by_key.pop(key)
        del self._by_rank[group.rank]
        self.num_changes += 1
        if group.rank in self._held:
            self._held.remove(group.rank)
        else:
            self._take_out_of_order(group)
        num_tokens, tenant = self._tokens.pop(key), group.request.tenant
        self.num_tokens -= num_tokens
        self._tokens_of_tenant[tenant] -= num_tokens
        self._num_of_tenant[tenant] -= 1
        if not self._num_of_tenant[tenant]:
            del self._num_of_tenant[tenant], self._tokens_of_tenant[tenant]
        return group

    def remove_all(self, groups: Collection[SequenceGroup]) -> None:
        """Takes many groups out, which are here, at once."""
        if len(groups) < _MANY:
            for group in groups:
                self.remove(group.request.key)
            return
        ended: dict[str, set[int]] = {}
        for group in groups:
            key = group.request.key
            del self._by_key[key], self._by_rank[group.rank]
            num_tokens = self._tokens.pop(key)
            ended.setdefault(group.request.tenant, set()).add(group.rank)
            self.num_tokens -= num_tokens
            self._tokens_of_tenant[group.request.tenant] -= num_tokens
        self.num_changes += len(groups)
        gone = set().union(*ended.values())
        self._held -= gone
        self._ranks = [rank for rank in self._ranks if rank not in gone]
        for tenant, own_gone in ended.items():
            own = self._of_tenant.get(tenant, [])
            own[:] = [rank for rank in own if rank not in own_gone]
            if not own:
                self._of_tenant.pop(tenant, None)
            self._num_of_tenant[tenant] -= len(own_gone)
            if not self._num_of_tenant[tenant]:
                del self._num_of_tenant[tenant], self._tokens_of_tenant[tenant]

    def take_all(self) -> list[SequenceGroup]:
        """Takes all groups out and returns them, in order."""
        groups = list(self)
        of_groups = (self._ranks, self._by_rank, self._by_key, self._tokens, self._held)
        for each in (*of_groups, self._of_tenant, self._tokens_of_tenant, self._num_of_tenant):
            each.clear()
        self.num_tokens = 0
        self.num_changes += len(groups)
        return groups

    def _put_in_order(self, group: SequenceGroup) -> None:
        rank, tenant = group.rank, group.request.tenant
        own = self._of_tenant.setdefault(tenant, [])
        insort(self._ranks, rank)
        insort(own, rank)
        if own[0] == rank and self._on_new_first is not None:
            self._on_new_first(tenant, rank)

    def _take_out_of_order(self, group: SequenceGroup) -> None:
        rank, tenant = group.rank, group.request.tenant
        own = self._of_tenant[tenant]
        for ranks in (self._ranks, own):
            del ranks[bisect_left(ranks, rank)]
        if not own:
            del self._of_tenant[tenant]
