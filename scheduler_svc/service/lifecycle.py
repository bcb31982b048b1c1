"""The lifecycle of a replica: its workers are attached or lost, it sleeps, it drains, and gateways learn whether it is
ready.

Asleep, no worker is attached, and the workers have released memory. All requests wait, as after the loss of a worker.
A replica that has been idle for `--idle-unload` dozes: it sleeps, and is ready, since the next request wakes it.
Draining, the replica refuses new requests for good and finishes the others, or hands them over to other replicas.
"""

import asyncio
import logging
from collections.abc import Callable

from quire.model_files.progress import ASLEEP, ASLEEP_WITHOUT_WEIGHTS, LoadProgress
from quire.rpc.errors import QuireError, Unavailable, Unimplemented
from quire.runtime import clock
from quire.runtime.failpoint import failpoint
from scheduler_svc.service.outbox import Readiness
from scheduler_svc.service.replica import Replica

_logger = logging.getLogger(__name__)
_RELEASE_TIMEOUT_S = 30.0
_WAKE_TIMEOUT_S, _LOAD_TIMEOUT_S = 30.0, 600.0
# Share of a drain's time in which requests leave only if there is room for them elsewhere.
_LEAVING, _MIN_LEAVING_S = 0.75, 0.001
# Seconds that requests that never ran wait in a drain, so that other replicas take them.
_HOLD_NEW_S = 0.5


class Lifecycle:
    """Decides whether this replica takes requests and whether its workers may be attached.

    Attributes:
        loading: The workers' progress in loading their model; None if they report none.
        is_draining: Whether new requests are refused for good.
        leave_after_s: Seconds after which requests leave a draining replica even if they have to wait elsewhere.
        sleep_requested: Set while the workers must stay detached.
    """

    def __init__(
        self,
        replica: Replica,
        tell_gateways: Callable[[Readiness], None],
        report_readiness: Callable[[bool], None],
        idle_unload_s: float = 0.0,
    ) -> None:
        """`report_readiness` is called whenever `is_ready` changes, and `tell_gateways` for other changes, too. After
        `idle_unload_s` without a request the replica dozes; 0 is never."""
        self.loading: LoadProgress | None = None
        self.is_draining = False
        self.leave_after_s = 0.0
        self.sleep_requested = asyncio.Event()
        self._replica = replica
        self._tell_gateways = tell_gateways
        self._report_readiness = report_readiness
        self._idle = asyncio.Event()
        self._idle.set()
        self._sleep_lock = asyncio.Lock()
        self._idle_unload_s = idle_unload_s
        self._idle_timer: asyncio.TimerHandle | None = None
        self._falling_asleep: asyncio.Task[None] | None = None
        # From the time when the workers begin to unload until they are attached again.
        self._dozes = False
        self._has_no_weights = False
        self._detached, self._attached = asyncio.Event(), asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        # Not set while a worker is about to release its memory: that would end an attachment in the meantime.
        self._released = asyncio.Event()
        self._released.set()

    @property
    def is_ready(self) -> bool:
        """Whether gateways should send requests to this replica."""
        return (self._replica.is_attached or self._dozes) and not self.is_draining

    @property
    def readiness(self) -> Readiness:
        """The readiness that gateways get."""
        is_busy = self.is_draining and not self._idle.is_set()
        return Readiness(self.is_ready, self.loading, self.is_draining, self.leave_after_s, is_busy)

    @property
    def is_asleep(self) -> bool:
        """Whether no worker is attached until `wake_up`."""
        return self.sleep_requested.is_set()

    def check_not_draining(self) -> None:
        """Raises Unavailable if this scheduler takes no new requests."""
        if self.is_draining:
            raise Unavailable("the scheduler drains", reason="DRAINING")

    def set_attached(self, is_attached: bool) -> None:
        """The workers were attached, or were lost or closed."""
        was_ready, dozed = self.is_ready, self._dozes
        self._replica.is_attached = is_attached
        if is_attached:
            self.loading = None
            self._dozes = False
            self._attached.set()
            self._watch_idle()
        else:
            self._attached.clear()
        if self.is_ready != was_ready or dozed != self._dozes:
            self._report()

    def set_loading(self, loading: LoadProgress | None) -> None:
        """Tells gateways how much of their model the workers have loaded, if that changed."""
        if loading != self.loading:
            self.loading = loading
            self._tell_gateways(self.readiness)

    def update_busy(self) -> None:
        """Called whenever the replica may have become busy or idle."""
        is_busy = self._replica.is_busy
        if is_busy != self._idle.is_set():
            return
        if is_busy:
            self._idle.clear()
        else:
            self._idle.set()
        self._watch_idle()
        if self.is_draining:
            self._tell_gateways(self.readiness)

    def _watch_idle(self) -> None:
        """The replica has become busy or idle, or was attached: wakes it from a doze, or begins to wait for one."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if not self._idle_unload_s:
            return
        if not self._replica.is_busy:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_unload_s, self._begin_doze)
        elif self._dozes and not self._sleep_lock.locked():
            self._wake_from_doze()

    def _begin_doze(self) -> None:
        if self._replica.has_pins:
            self._watch_idle()
        elif self._replica.is_attached and not self.is_draining:
            self._falling_asleep = asyncio.create_task(self._doze(), name="idle")

    async def _doze(self) -> None:
        self._dozes = True
        try:
            await self._sleep(discard_weights=True)
        except QuireError as error:
            _logger.warning("idle, but the memory stays: %s", error)
            self._end_doze()
        # A request may have come meanwhile.
        if self._dozes and self._replica.is_busy:
            self._wake_from_doze()

    def _wake_from_doze(self) -> None:
        _logger.info("a request ends the sleep of the idle replica")
        self._end_sleep()
        # If the workers do not come back, other replicas take the requests.
        asyncio.get_running_loop().call_later(_LOAD_TIMEOUT_S, self._end_doze)

    def _end_doze(self) -> None:
        """From now on only attached workers make the replica ready."""
        if self._dozes and not self.is_asleep:
            self._dozes = False
            if not self._replica.is_attached:
                self._report()

    async def drain(self, timeout_s: float | None) -> int:
        """Refuses new requests from now on, reports that, and waits until the replica is idle: no request is live or
        has just moved elsewhere, all blocks are sealed and none is kept for another replica. Requests that were
        accepted before still arrive, if no other replica takes them.

        Returns the number of live requests at the timeout; None waits without limit.
        """
        self._end_sleep()
        self.leave_after_s = 0.0 if timeout_s is None else max(_LEAVING * timeout_s, _MIN_LEAVING_S)
        replica = self._replica
        if replica.scheduler is not None and not self.is_draining:
            replica.scheduler.hold_new(clock.monotonic(), _HOLD_NEW_S)
            replica.wake_after(_HOLD_NEW_S)
        self.is_draining = True
        self._report()
        failpoint("scheduler.drain.begun")
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            _logger.warning("%d requests still live after draining for %s s", replica.num_live, timeout_s)
        return replica.num_live

    async def sleep(self, *, discard_weights: bool) -> None:
        """Makes the workers release the memory of their pools, and of their weights with `discard_weights`, and
        attaches none until `wake_up`. Idempotent; a second call may discard weights that the first one kept.

        Raises:
            QuireError: no worker is attached, one cannot release memory, or this scheduler drains. Then requests
                continue, unless an earlier call made them wait.
        """
        await self._sleep(discard_weights=discard_weights)
        if self._dozes:
            # An operator's sleep ends by `wake_up` only.
            self._dozes = False
            self._report()

    async def _sleep(self, *, discard_weights: bool) -> None:
        async with self._sleep_lock:
            self.check_not_draining()
            if self.is_asleep and (self._has_no_weights or not discard_weights):
                return
            replica, was_asleep = self._replica, self.is_asleep
            if replica.info is None or not (replica.is_attached or was_asleep):
                raise Unavailable("no worker is attached", reason="NO_WORKER", retry_after_ms=1000)
            if replica.info.device not in ("", "cpu") and not discard_weights:
                raise Unimplemented(
                    f"the KV pool is on {replica.info.device}, whose memory goes back only with the weights: use "
                    "level 2",
                    reason="POOL_STAYS",
                )
            self._awake.clear()
            self._released.clear()
            self.sleep_requested.set()
            try:
                async with asyncio.timeout(_RELEASE_TIMEOUT_S):
                    await self._detached.wait()
                self.check_not_draining()
                await replica.release_memory(_RELEASE_TIMEOUT_S, discard_weights=discard_weights)
            except BaseException:
                if not was_asleep:
                    self._end_sleep()
                raise
            finally:
                self._released.set()
            # A drain may have ended the sleep meanwhile.
            self.check_not_draining()
            self._has_no_weights = discard_weights
            replica.forget_cached()
            self.set_loading(LoadProgress(ASLEEP_WITHOUT_WEIGHTS if discard_weights else ASLEEP))
            what = "KV pools and weights" if discard_weights else "KV pools"
            _logger.info(
                "asleep: the workers gave the memory of their %s back; %d requests wait", what, replica.num_live
            )

    async def wake_up(self) -> None:
        """Ends a `sleep`, and waits until the workers are attached. Idempotent. Raises Unavailable if they do not come
        back in time."""
        async with self._sleep_lock:
            timeout_s = _LOAD_TIMEOUT_S if self._has_no_weights else _WAKE_TIMEOUT_S
            self._end_sleep()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._attached.wait()
            except TimeoutError:
                text = f"the worker did not come back within {timeout_s:g} s"
                raise Unavailable(text, reason="NO_WORKER", retry_after_ms=1000) from None

    async def wait_until_awake(self) -> None:
        """Waits, with no worker attached, until the sleep is over."""
        self._detached.set()
        await self._awake.wait()
        await self._released.wait()
        self._detached.clear()

    def _end_sleep(self) -> None:
        self._has_no_weights = False
        self.sleep_requested.clear()
        self._awake.set()

    def _report(self) -> None:
        self._tell_gateways(self.readiness)
        self._report_readiness(self.is_ready)
