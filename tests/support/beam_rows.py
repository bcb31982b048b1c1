"""A beam search over the raw step protocol: each beam is a row, and whoever goes on twice is forked."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.arrays import decode_float32, encode_int32
from quire.worker.v1 import worker_pb2
from tests.support.worker_client import StepClient, ints, make_assign, make_batch

Ranked = list[tuple[int, float]]
"""Token ids and log probabilities, best first."""


def ranked(candidates: worker_pb2.RowCandidates) -> Ranked:
    return list(zip(ints(candidates.token_ids), decode_float32(candidates.logprobs, "logprobs").tolist(), strict=True))


@dataclass(slots=True)
class Beam:
    tokens: list[int]
    score: float
    blocks: list[int]


class BeamRows:
    """Beams at rows 0 to `width`, whose sequences hold the prompt and one token more a step."""

    def __init__(self, client: StepClient, width: int, num_candidates: int) -> None:
        self._client = client
        self._width = width
        self._num_candidates = num_candidates
        self._block_size = client.info.pool.block_size
        self.beams: list[Beam] = []

    async def begin(self, prompt: Sequence[int], **sampling: object) -> list[Ranked]:
        """Computes the prompt in row 0, from whose logits all rows report; their candidates by row."""
        blocks = list(range(-(-len(prompt) // self._block_size)))
        self.beams = [Beam(list(prompt), 0.0, list(blocks)) for _ in range(self._width)]
        result = await self._client.run(
            assign=[make_assign(0, prompt, blocks, num_candidates=self._num_candidates, **sampling)],
            fork=_flat((0, child) for child in range(1, self._width)),
            batch=make_batch([0], [len(prompt)], [0], [(row, 0) for row in range(self._width)]),
        )
        return self._reported(result)

    async def advance(self, choices: Sequence[tuple[int, int, float]]) -> list[Ranked]:
        """Lets one beam a row go on, all in one step, and returns the candidates by row.

        Args:
            choices: For each row the row that it goes on from, the token that it takes and its score.
        """
        position = len(self.beams[0].tokens)
        next_beams = [
            Beam([*self.beams[parent].tokens, token_id], score, list(self.beams[parent].blocks))
            for parent, token_id, score in choices
        ]
        copies, deltas = self._give_own_blocks(next_beams, position)
        self.beams = next_beams
        rows = list(range(self._width))
        result = await self._client.run(
            cache_operations={"copy": _flat(copies)},
            fork=_flat((parent, row) for row, (parent, _, _) in enumerate(choices) if parent != row),
            set_tokens=[
                {"row": row, "position": position, "token_ids": encode_int32([token_id])}
                for row, (_, token_id, _) in enumerate(choices)
            ],
            block_table_deltas=_flat(deltas),
            batch=make_batch(rows, [1] * self._width, [position] * self._width),
        )
        return self._reported(result)

    def best(self, reported: Sequence[Ranked]) -> list[tuple[int, int, float]]:
        """The best continuations of all beams, as `advance` takes them, in order of score whatever row they go to."""
        first_step = all(beam.score == 0.0 for beam in self.beams)
        joined = [
            (row, token_id, self.beams[row].score + logprob)
            for row, candidates in enumerate(reported[:1] if first_step else reported)
            for token_id, logprob in candidates
        ]
        return sorted(joined, key=lambda each: -each[2])[: self._width]

    def _give_own_blocks(
        self, beams: list[Beam], position: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        """The block that the new token is written to is held by one beam alone: copied where it is begun already."""
        # What was held before may be read by a copy, so none of it is given away in the same step.
        held = {block for beam in (*beams, *self.beams) for block in beam.blocks}
        free = iter(set(range(self._client.info.pool.num_gpu_blocks)) - held)
        index, copies, deltas = position // self._block_size, [], []
        for row, beam in enumerate(beams):
            own = next(free)
            if index < len(beam.blocks):
                copies.append((beam.blocks[index], own))
            beam.blocks[index:] = [own]
            deltas.append((row, index, own))
        return copies, deltas

    def _reported(self, result: worker_pb2.StepResult) -> list[Ranked]:
        assert not any(ints(result.token_ids))
        assert not result.failures
        by_row = {candidates.row: ranked(candidates) for candidates in result.candidates}
        assert sorted(by_row) == list(range(self._width))
        return [by_row[row] for row in range(self._width)]


def _flat(tuples: Iterable[Sequence[int]]) -> bytes:
    return np.array([number for each in tuples for number in each], np.int32).tobytes()
