"""Log probabilities as they pass through the core, which picks rows of them and looks at no more than their sums."""

from dataclasses import dataclass

import numpy as np

from quire.logprob_columns import LogprobColumns


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    """The log probabilities of some of a step's samples."""

    samples: np.ndarray
    """int64[m], indices into the step's samples, rising."""
    columns: LogprobColumns

    def check(self, num_samples: int) -> None:
        """Raises ValueError unless it is of some of so many samples, and its columns fit each other."""
        samples, columns = self.samples, self.columns
        num_positions, num_top = len(columns), int(columns.top_counts.sum(dtype=np.int64))
        of_positions = (samples, columns.chosen_ranks, columns.top_counts)
        if any(len(each) != num_positions for each in of_positions) or not (
            num_top == len(columns.top_token_ids) == len(columns.top_logprobs) and (columns.top_counts >= 0).all()
        ):
            raise ValueError(f"the columns of {num_positions} log probabilities are not of one length")
        if num_positions and not (samples[0] >= 0 and samples[-1] < num_samples and (samples[1:] > samples[:-1]).all()):
            raise ValueError(
                f"log probabilities are of the samples {samples.tolist()} out of {num_samples}, not rising"
            )

    def of(self, samples: np.ndarray) -> tuple[np.ndarray, LogprobColumns]:
        """Which of these samples, int64[n] and rising, have log probabilities, as indices into them, and those."""
        _, places, positions = np.intersect1d(samples, self.samples, assume_unique=True, return_indices=True)
        return places, self.columns.take(positions)

    def of_sample(self, sample: int) -> LogprobColumns | None:
        """Those of one sample, None where it has none."""
        position = int(np.searchsorted(self.samples, sample))
        if position == len(self.samples) or self.samples[position] != sample:
            return None
        return self.columns.part(position, position + 1)
