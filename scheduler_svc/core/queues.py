"""Where sequence groups wait and run."""

from collections import OrderedDict
from collections.abc import Iterator

from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import SequenceGroup


class GroupQueue:
    """Groups in order of arrival, with O(1) removal of any of them.

    Both queues of the scheduler are such: admission takes the oldest waiting, preemption the newest running group and
    puts it before all that wait. So every running group arrived before every waiting one.
    """

    def __init__(self) -> None:
        self._groups: OrderedDict[RequestKey, SequenceGroup] = OrderedDict()
        self.num_tokens = 0
        """Tokens of all groups at the time when they were put in."""
        self._tokens: dict[RequestKey, int] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups.values())

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._groups

    def get(self, key: RequestKey) -> SequenceGroup:
        return self._groups[key]

    def oldest(self) -> SequenceGroup:
        return next(iter(self._groups.values()))

    def newest(self) -> SequenceGroup:
        return next(reversed(self._groups.values()))

    def append(self, group: SequenceGroup) -> None:
        """Puts the group behind all others."""
        self._groups[group.request.key] = group
        self._count(group)

    def append_first(self, group: SequenceGroup) -> None:
        """Puts the group before all others."""
        self.append(group)
        self._groups.move_to_end(group.request.key, last=False)

    def remove(self, key: RequestKey) -> SequenceGroup:
        self.num_tokens -= self._tokens.pop(key)
        return self._groups.pop(key)

    def _count(self, group: SequenceGroup) -> None:
        self._tokens[group.request.key] = group.num_tokens
        self.num_tokens += group.num_tokens
