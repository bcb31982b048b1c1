"""Runs decodes for several passes on the CPU, if their rows need only a draw from their logits.

The general preparation of a pass by `ModelRunner` (drafts, masks, rules, reports) takes about half a millisecond of
Python. Between two passes of such decodes only the tokens, their positions and their slots change, and the random
numbers of all passes are made at once.
"""

import numpy as np
from numpy.typing import NDArray

from worker_svc.device.replay import RecordedDecodes
from worker_svc.device.rows import Rows
from worker_svc.sampling.sampler import Drawn, RowDraws
from worker_svc.sampling.sampling_table import SamplingColumns


def are_plain(columns: SamplingColumns) -> bool:
    """Whether rows are drawn from their logits as they are, and report only tokens."""
    special = columns.changes_logits | columns.wants_logprobs | columns.is_refused | (columns.num_candidates > 0)
    return not special.any()


class DecodeRun:
    """Some passes of the same n rows. Each gives each row one token, which the next one computes.

    Attributes:
        num_left: The passes that may still run.
    """

    def __init__(
        self,
        decodes: RecordedDecodes,
        rows: Rows,
        chosen: NDArray[np.integer],
        columns: SamplingColumns,
        starts: NDArray[np.int64],
        num_passes: int,
        block_size: int,
    ) -> None:
        """
        Args:
            chosen: [n], which of `rows`. They have blocks for all passes.
            columns: of these; `are_plain`.
            starts: [n], the position of the token of each that the first pass computes.
        """
        self.num_left = num_passes
        self._decodes, self._token_ids = decodes, rows.token_ids.numpy()
        self._rows = chosen.astype(np.int64)
        self._positions = starts + np.arange(num_passes + 1)[:, None]
        blocks, offsets = np.divmod(self._positions[:-1], block_size)
        tables = rows.block_tables.numpy()
        self._slots = tables[self._rows, blocks].astype(np.int64) * block_size + offsets
        self._draws = RowDraws.from_columns(columns, starts + 1, num_passes)
        decodes.set_rows(tables[self._rows, : int(blocks.max()) + 1], rows.adapter_slots[self._rows])

    def next(self) -> Drawn:
        """Runs a pass, and appends the drawn tokens to the rows."""
        index = len(self._slots) - self.num_left
        self.num_left -= 1
        positions, after = self._positions[index : index + 2]
        logits = self._decodes.run(self._token_ids[self._rows, positions], positions, self._slots[index])
        drawn = self._draws.draw(logits, index)
        self._token_ids[self._rows, after] = drawn.token_ids.numpy()
        return drawn
