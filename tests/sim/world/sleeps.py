"""Sleep in a world: invariants of schedulers that report to be asleep or awake, and operators that put replicas to
sleep and wake them over HTTP."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from quire.model_files.progress import ASLEEP, ASLEEP_WITHOUT_WEIGHTS, LoadProgress
from quire.rpc.errors import QuireError, Unavailable, Unimplemented
from quire.runtime.clock import CLOCK
from tests.sim.world.faults import Nap
from tests.sim.world.http_calls import HttpClient
from tests.sim.world.oracles import Circumstances, FalseAnswerError
from tests.sim.world.watch import CheckedDrains
from tests.sim.world.world import Node

_TRY_EVERY_S = 1.0
_LOAD_S = 100.0
"""Maximum seconds that a model takes to load."""
_HEALTHY_S = 1.0
"""By then a gateway has received the state that a scheduler reported before it answered."""


class Memory(Protocol):
    """The memory of a scheduler's workers."""

    @property
    def now(self) -> float:
        """The time of the world."""
        ...

    def kept(self, scheduler: str, since_s: float, *, is_without_weights: bool) -> str | None:
        """Memory that a worker still has though it was released for the sleep that began then, or None."""
        ...

    def leaving(self, scheduler: str) -> str | None:
        """A worker that is about to reload; None if there is none."""
        ...


class CheckedLifecycle(CheckedDrains):
    """A lifecycle whose reported sleep state is checked."""

    memory: Memory
    _slept = 0
    """The level of its sleep, 0 if it is awake."""
    _since_s = 0.0

    async def sleep(self, *, discard_weights: bool) -> None:
        began_s, epoch = self.memory.now, None if self._sleep_lock.locked() else self._replica.epoch
        try:
            await super().sleep(discard_weights=discard_weights)
        except (Exception, asyncio.CancelledError) as error:
            # Otherwise another call has its turn.
            if not self._sleep_lock.locked() and self.is_asleep != (self._slept > 0):
                self._complain(f"a sleep that fails leaves it {'asleep' if self.is_asleep else 'awake'}: {error}")
            if isinstance(error, Unimplemented) and epoch not in (None, self._replica.epoch) and not self._slept:
                self._complain("a sleep that is refused has an effect")
            if not isinstance(error, QuireError | asyncio.CancelledError):
                self._complain(f"a sleep fails by {type(error).__name__}: {error}")
            raise
        self._since_s = self._since_s if self._slept else began_s
        self._slept = max(self._slept, 2 if discard_weights else 1)
        if not self.is_asleep or self._replica.is_attached or self.is_draining:
            self._complain("it says that it sleeps, and does not")
        if self.loading != LoadProgress(ASLEEP_WITHOUT_WEIGHTS if self._slept > 1 else ASLEEP):
            self._complain(f"it sleeps at level {self._slept}, and tells gateways {self.loading}")
        self._check_memory()

    async def wake_up(self) -> None:
        if self._slept and not self._sleep_lock.locked():
            self._check_memory()
        began_s = self.memory.now
        try:
            await super().wake_up()
        except Unavailable as error:
            if self._slept > 1 and self.memory.now < began_s + _LOAD_S:
                self._complain(f"it does not wait for the load of a model: {error}")
            raise
        finally:
            if not self.is_asleep:
                self._slept = 0
        if self.is_asleep or not self._replica.is_attached:
            self._complain("it says that it is awake, and is not")
        if (leaving := self.memory.leaving(_host())) is not None:
            self._complain(f"it says that it is awake, and {leaving} is about to leave")

    async def drain(self, timeout_s: float | None) -> int:
        self._slept = 0
        remaining = await super().drain(timeout_s)
        if self.is_asleep:
            self._complain("it drains, and sleeps")
        return remaining

    def set_attached(self, is_attached: bool) -> None:
        if is_attached and self.is_asleep:
            self._complain("it attaches its worker while it sleeps")
        super().set_attached(is_attached)

    def _check_memory(self) -> None:
        if (kept := self.memory.kept(_host(), self._since_s, is_without_weights=self._slept > 1)) is not None:
            self._complain(f"it sleeps, and {kept}")
        core = self._replica.scheduler
        assert core is not None
        if core.batch.blocks.pool.num_cached or len(core.tier):
            self._complain("it sleeps, and takes blocks to be cached")

    def _complain(self, what: str) -> None:
        node = CLOCK.get()
        assert isinstance(node, Node)
        node.fail(AssertionError(f"{node.host}: {what}"))


def _host() -> str:
    node = CLOCK.get()
    assert isinstance(node, Node)
    return node.host


@dataclass(slots=True)
class Operator:
    """An operator that puts all replicas to sleep.

    Attributes:
        has_pool_on_device: Whether workers refuse the first level.
        is_alone: Whether no other operator is active now.
        sleeping: The schedulers that sleep.
    """

    http: HttpClient
    circumstances: Circumstances
    has_pool_on_device: bool
    is_alone: Callable[[], bool]
    sleeping: Callable[[], list[str]]

    async def nap(self, nap: Nap) -> None:
        """Puts all replicas to sleep and wakes them; retries until it is done."""
        for level in nap.levels:
            await self._sleep(nap, level)
            await asyncio.sleep(nap.sleeps_s)
        while True:
            if await self._wakes(nap):
                self.http.close()
                return
            await asyncio.sleep(_TRY_EVERY_S)

    @property
    def _is_undisturbed(self) -> bool:
        """Whether a call must take effect."""
        told = self.circumstances
        return self.is_alone() and not (told.has_faults or told.deadly or told.deadly_need)

    async def _sleep(self, nap: Nap, level: int) -> None:
        status, value = await self._call(nap, "POST", f"/sleep?level={level}")
        if self.has_pool_on_device and level == 1 and status == 400:
            self._demand(value["error"]["code"] == "pool_stays", f"a sleep is refused by {value}")
        elif self._is_undisturbed:
            self._demand((status, value) == (200, {"is_sleeping": True}), f"a sleep is answered by {status} {value}")
            asleep = await self._call(nap, "GET", "/is_sleeping")
            self._demand(asleep == (200, {"is_sleeping": True}), f"all sleep, and /is_sleeping says {asleep}")
            await self._see_health(nap, 503, "asleep" if level == 1 else "asleep without weights")
        else:
            self._demand(status in (200, 503, 504), f"a sleep is answered by {status} {value}")

    async def _wakes(self, nap: Nap) -> bool:
        """Whether nothing sleeps any more."""
        status, value = await self._call(nap, "POST", "/wake_up")
        if self._is_undisturbed:
            self._demand((status, value) == (200, {"is_sleeping": False}), f"/wake_up answers {status} {value}")
            self._demand(not (asleep := self.sleeping()), f"/wake_up was answered, and {asleep} sleep")
            await self._see_health(nap, 200, "")
        self._demand(status in (200, 503, 504), f"/wake_up answers {status} {value}")
        return status == 200 and not self.sleeping()

    async def _see_health(self, nap: Nap, wanted: int, reason: str) -> None:
        """Checks that a gateway soon reports the state, too."""
        for is_last in (False, True):
            status, value = await self._call(nap, "GET", "/health")
            if status == wanted and reason in value.get("reason", ""):
                return
            is_wrong = is_last and self._is_undisturbed
            self._demand(not is_wrong, f"/health says {status} {value}, not {wanted} {reason}")
            await asyncio.sleep(_HEALTHY_S)

    async def _call(self, nap: Nap, method: str, path: str) -> tuple[int, Mapping[str, Any]]:
        """The status and the answer; 503 if the connection ends before."""
        try:
            return await self.http.command(nap.gateway, method, path)
        except QuireError:
            return 503, {}

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise FalseAnswerError(otherwise)
