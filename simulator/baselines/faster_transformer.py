"""FasterTransformer behind a dynamic batching scheduler, as the paper's section 6.1 has it.

Its scheduler takes as many of the requests that came first as there is memory for, each with room for the longest
sequence of the model, and computes this batch to its end before it takes the next one. The requests of a batch are
answered together.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.request import RequestKey
from scheduler_svc.core.sequence import Sequence
from simulator.baselines.contiguous import ContiguousBlocks, Reservation


class RequestLevelBatches(ContiguousBlocks):
    """Admits requests only to a batch that no step has answered yet, and frees regions only when all of it is over.

    `batches` are the keys of the requests of each batch so far, in the order in which the batches ran.
    """

    reservation = Reservation.MAX

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        super().__init__(num_blocks, block_size, max_model_len)
        self.batches: list[list[RequestKey]] = []
        self._batch: list[Sequence] = []
        self._over: list[Sequence] = []

    def has_room(self, num_blocks: int, *, reserve: int, others_run: bool) -> bool:
        has_run = any(sequence.num_output_tokens for sequence in self._batch)
        return not has_run and super().has_room(num_blocks, reserve=reserve, others_run=others_run)

    def allocate_slots(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, int]]:
        request = sequences[0].request
        if request.num_sequences > 1:
            raise ValueError(f"a request has {request.num_sequences} sequences; batches take requests of one")
        if not self._batch:
            self.batches.append([])
        self._batch += sequences
        self.batches[-1].append(request.key)
        return super().allocate_slots(sequences)

    def retire(self, sequences: Iterable[Sequence]) -> None:
        self._over += [sequence for sequence in sequences if sequence in self._batch]
        if len(self._over) == len(self._batch):
            over, self._over, self._batch = self._over, [], []
            super().retire(over)
