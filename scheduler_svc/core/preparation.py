"""Constraints that the workers compile before rows with them are planned.

All rows of a step wait for each other, and a constraint may take half a second to compile. So a group with a constraint
enters the batch only after the workers have said that they have compiled it; meanwhile it is held, and those behind it
pass.

Workers keep at least the `NUM_KEPT` constraints that were prepared last. What is older is prepared again, should a
group with it come, or come back after a preemption.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from scheduler_svc.core.request import Request, RequestKey

NUM_KEPT = 64
"""What workers must keep; see PrepareConstraint."""
_MAX_UNDERWAY = 2
"""A worker compiles one after the other. More of them would only wait there, where tenants have no turns."""

_MAX_WAITING = 16
"""While no more groups wait, a constraint is prepared on arrival; otherwise when its group is next."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What the workers are to be told: the sampling parameters with the constraint, and a number for the answer."""

    number: int
    parameters: bytes


class Preparations:
    """Which constraints the workers have compiled, and which come next: one of each tenant in turn."""

    def __init__(self, *, are_on: bool) -> None:
        """With `are_on` False every constraint counts as compiled: workers compile when rows need it."""
        self._are_on = are_on
        # All are known by the parameters of the request; the oldest comes first.
        self._ready: dict[bytes, None] = {}
        self._underway: dict[int, bytes] = {}
        self._wanted: OrderedDict[str, dict[bytes, None]] = OrderedDict()
        self._held: dict[bytes, list[RequestKey]] = {}
        self._num_begun = 0
        # Numbers that nobody waits for any more; their answers may still come.
        self._given_up: set[int] = set()

    def arrived(self, request: Request, num_waiting: int) -> None:
        """A request joined the queue. Prepares its constraint now, unless it will wait for long."""
        if num_waiting <= _MAX_WAITING:
            self._want(request)

    def hold(self, request: Request) -> bool:
        """Whether a request that is next must wait for its constraint. `done` returns it then."""
        if self._is_ready(request):
            return False
        self._want(request)
        self._held.setdefault(request.sampling.parameters, []).append(request.key)
        return True

    def is_held(self, key: RequestKey) -> bool:
        """Whether a request waits for its constraint."""
        return any(key in keys for keys in self._held.values())

    @property
    def has_wanted(self) -> bool:
        """Whether there may be something for `take`."""
        return bool(self._wanted)

    def take(self) -> Iterator[Preparation]:
        """What the workers are to be told now. All of it must be told."""
        while self._wanted and len(self._underway) < _MAX_UNDERWAY:
            tenant, wanted = self._wanted.popitem(last=False)
            parameters = next(iter(wanted))
            del wanted[parameters]
            if wanted:
                self._wanted[tenant] = wanted
            # Another tenant may have wanted the same.
            if parameters not in self._ready and parameters not in self._underway.values():
                self._num_begun += 1
                self._underway[self._num_begun] = parameters
                yield Preparation(self._num_begun, parameters)

    def done(self, number: int) -> list[RequestKey]:
        """All workers have compiled it, or found that they cannot. Returns the requests that waited for it.

        Raises ValueError if nothing of this number is underway.
        """
        if number in self._given_up:
            self._given_up.remove(number)
            return []
        if number not in self._underway:
            raise ValueError(f"preparation {number} was answered; underway are {sorted(self._underway)}")
        parameters = self._underway.pop(number)
        self._ready[parameters] = None
        if len(self._ready) > NUM_KEPT:
            del self._ready[next(iter(self._ready))]
        return self._held.pop(parameters, [])

    def give_up(self, number: int) -> list[RequestKey]:
        """The workers take too long for it: others take its turn. Returns the requests that waited for it. KeyError if
        nothing of this number is underway."""
        parameters = self._underway.pop(number)
        self._given_up.add(number)
        return self._held.pop(parameters, [])

    def refused(self, rows: Collection[int]) -> None:
        """The workers refused how these rows sample. If a constraint failed, they drop what they compiled, so all is
        prepared again when it is needed: what is still there is answered at once."""
        if rows:
            self._ready.clear()

    def _is_ready(self, request: Request) -> bool:
        return not (self._are_on and request.has_constraint) or request.sampling.parameters in self._ready

    def _want(self, request: Request) -> None:
        parameters = request.sampling.parameters
        if not self._is_ready(request) and parameters not in self._underway.values():
            self._wanted.setdefault(request.tenant, {})[parameters] = None
