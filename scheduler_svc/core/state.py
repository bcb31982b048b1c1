"""Everything that one replica's scheduler knows, and the verbs that all of its parts use."""

from collections import deque
from collections.abc import Iterable, Iterator

from scheduler_svc.core.batch import Batch
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.pins import Pins
from scheduler_svc.core.policy import make_policy
from scheduler_svc.core.queues import GroupQueue
from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import Milestone, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_plan import StepInFlight
from scheduler_svc.core.swap import SwapSpace


class SchedulerState:
    """Live groups are in exactly one of the three queues: `running` ones have rows and GPU blocks, `swapped` ones host
    blocks, `waiting` ones neither."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.policy = make_policy(config.policy)
        self.waiting = GroupQueue(self.policy.new_first)
        self.swapped = GroupQueue(self.policy.new_first)
        self.running = GroupQueue()
        self.in_flight: deque[StepInFlight] = deque()
        self.pins = Pins(config)
        self.batch = Batch(config)
        self.swap_space = SwapSpace(config.num_host_blocks)
        self.num_uncached: dict[RequestKey, int] = {}
        """Tokens that groups that wait have to compute, as far as they were looked up for the step that is planned."""

    def groups(self) -> Iterator[SequenceGroup]:
        """All live requests: those that run, then swapped ones, then those that wait."""
        yield from self.running
        yield from self.swapped
        yield from self.waiting

    def queue_of(self, key: RequestKey) -> GroupQueue | None:
        """Where a live request is; None for one that is not live."""
        for queue in (self.running, self.waiting, self.swapped):
            if key in queue:
                return queue
        return None

    def end(self, sequences: Iterable[Sequence]) -> None:
        """The sequences are over: they give back whatever they hold."""
        others: list[Sequence] = []
        swapped, finished = SequenceStatus.SWAPPED, SequenceStatus.FINISHED
        for sequence in sequences:
            if sequence.status is swapped:
                self.swap_space.free(sequence)
            else:
                others.append(sequence)
            sequence.status = finished
        self.batch.retire(others)

    def end_group(self, key: RequestKey) -> SequenceGroup | None:
        """Ends all sequences of a live request and forgets it; None where there is none."""
        queue = self.queue_of(key)
        if queue is None:
            return None
        group = queue.remove(key)
        self.end(group.unfinished)
        return group

    def requeue(self, group: SequenceGroup) -> None:
        """Recompute (the paper's section 4.5): a running group waits again; prompt and output so far are its prompt."""
        self.running.remove(group.request.key)
        self._leave(group)
        self.batch.release(*group.unfinished)
        for sequence in group.unfinished:
            sequence.status = SequenceStatus.WAITING
        self.waiting.add(group)

    def swap_out(self, group: SequenceGroup) -> bool:
        """Moves a running group's blocks to host memory, all or nothing; returns whether it could."""
        computing = group.computing
        for sequence in computing:
            sequence.num_swapped_tokens = self._num_to_keep(sequence)
        if not self._can_swap_out(computing):
            return False
        self.running.remove(group.request.key)
        self._leave(group)
        for sequence in group.unfinished:
            self.batch.leave(sequence)
            if sequence not in computing:
                self.batch.blocks.free(sequence)
                sequence.status = SequenceStatus.WAITING
        self.batch.draft.swap_out(self.swap_space.swap_out(computing, self.batch.blocks))
        for sequence in computing:
            sequence.status = SequenceStatus.SWAPPED
        self.swapped.add(group)
        return True

    def forget_worker(self, now: float) -> None:
        """All steps in flight and both pools are gone: every group waits, with the rank that it had."""
        self.in_flight.clear()
        self.waiting.let_all_go()
        for queue in (self.running, self.swapped):
            for group in queue.take_all():
                self.waiting.add(group)
                group.timeline.note(Milestone.WORKER_LOST, now)
                self._leave(group)
                for sequence in group.unfinished:
                    sequence.block_table, sequence.row = [], None
                    sequence.status = SequenceStatus.WAITING
        self.batch = Batch(self.config)
        self.swap_space = SwapSpace(self.config.num_host_blocks)

    def _num_to_keep(self, sequence: Sequence) -> int:
        """Tokens whose keys and values are worth keeping. The newest token is computed again, to sample after it: what
        steps in flight sample for a row that was released is dropped."""
        assert sequence.row is not None
        return min(int(self.batch.rows.num_computed[sequence.row]), sequence.num_tokens - 1)

    def _can_swap_out(self, computing: list[Sequence]) -> bool:
        """Sequences that are prefilled together read blocks that one of them has yet to compute: those do not move."""
        is_settled = all(sequence.num_swapped_tokens == sequence.num_tokens - 1 for sequence in computing)
        return (
            (is_settled or len(computing) == 1)
            and computing[0].num_swapped_tokens > 0
            and self.swap_space.can_swap_out(computing, self.batch.blocks)
        )

    def _leave(self, group: SequenceGroup) -> None:
        """Candidates of a search that is interrupted come again."""
        if group.beams is not None:
            group.beams.candidates.clear()
