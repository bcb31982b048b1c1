"""Loss of the worker: steps in flight that were refused or lost, and the requests that are at fault."""

from scheduler_svc.core.arrivals import Arrivals
from scheduler_svc.core.request import Adapter, ClientId, Constraint, MovedBlocks
from scheduler_svc.core.sequence import Milestone
from scheduler_svc.core.state import State
from scheduler_svc.core.step import ClientEvents


class Losses:
    """Forgets what a lost worker computed, and ends requests that cause losses (see `fault_isolation`)."""

    def __init__(self, state: State, arrivals: Arrivals) -> None:
        self._state = state
        self._arrivals = arrivals

    def refuse_in_flight(self, detail: str) -> dict[ClientId, ClientEvents]:
        """The worker refused the oldest step in flight, for the reason `detail`. `void_in_flight` must follow.

        Returns the failure of the request at fault, once that is known (see `fault_isolation`).
        """
        group = self._state.trials.refused(self._state.running)
        if group is None:
            return {}
        message = f"the worker refused a step of only this request: {detail}"
        return self._arrivals.fail([group.request.key], message, reason="STEP_REFUSED")

    def lose_in_flight(self, detail: str | None = None) -> None:
        """The worker was lost for an unknown reason, or was dropped for the reason `detail`. `void_in_flight` must
        follow, and `judge_loss` once a worker is attached again."""
        state = self._state
        needs = state.preparations.underway
        if state.in_flight or needs:
            state.trials.lost(state.running if state.in_flight else (), needs, state.batch.rows, detail)

    def judge_loss(self, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        """A worker was attached. The caller calls this before anything runs, with `was_alive` if it is the worker that
        was lost, and it neither hung nor sent invalid answers.

        Returns the failures of the request that causes the losses, or of the requests whose common need causes them,
        once that is known.
        """
        fault = self._state.trials.attached(self._state.queues.is_live, was_alive=was_alive)
        if fault is None:
            return {}
        at_fault, losses = fault.suspect, fault.losses
        match at_fault:
            case Constraint():
                what, condition = "the constraint of this request was compiled", "while nothing else was done"
            case Adapter():
                what = f"the adapter of this request, {at_fault.name} from {at_fault.directory}, was loaded"
                condition = "while nothing else was done"
            case _:
                what, condition = "this request ran", "at the same step, in which only it ran"
        last = f"the last {losses.num_alone} times {condition}"
        message = f"the worker was lost {losses.num} times in a row while {what}, {last}"
        if fault.detail is not None:
            message += f": {fault.detail}"
        assert not isinstance(at_fault, MovedBlocks), "they are fetched once, whatever is lost meanwhile"
        if isinstance(at_fault, Constraint | Adapter):
            keys = [group.request.key for group in self._state.groups() if at_fault in group.request.needs]
        else:
            keys = [at_fault]
        return self._arrivals.fail(keys, message, reason="WORKER_LOST")

    def void_in_flight(self, now: float) -> None:
        """The worker was lost: forgets all steps in flight, all computed tokens and all blocks.

        Every group waits again in its place, and every pin that held blocks is computed again.
        """
        state = self._state
        state.in_flight.clear()
        state.waiting.release_all()
        for group in state.waiting.all():
            group.has_been_passed = False
        for queue in (state.running, state.swapped):
            for group in queue.take_all():
                group.timeline.note(Milestone.WORKER_LOST, now)
                for sequence in group.unfinished:
                    sequence.block_table, sequence.row = [], None
                group.restart()
                state.waiting.add(group)
        pinned = [pin for pin in state.pins if pin.is_held]
        state.make_pools()
        for pin in pinned:
            self._arrivals.arrive(pin.request(), now)
