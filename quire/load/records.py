"""The course of one request, measured or simulated."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

_no_counts = partial(np.empty, 0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecord:
    """One request from its arrival to its end. Times are seconds since the run began.

    Tokens come in chunks, each with its time, its sequence and its number of tokens. A beam search without a stream has
    one chunk per sequence, at its end.

    Attributes:
        index: Position of the request in its load.
        arrival_s: When it was due. Latencies count from here, so that waiting for a slot at the client is seen.
        sent_s: When it was sent; None if it never was.
        end_s: When its last part came, or the error.
        chunk_times_s: float64[k], never falling.
        chunk_tokens: int32[k].
        chunk_sequences: int32[k].
        prompt_tokens: As counted by the server, else as sent; None if neither is known.
        cached_tokens: Cached tokens of the prompt; None if the server does not say.
        preemptions: None if the server does not say.
        error: The reason in a few words, the same for the same kind of error; None if it ended well.
    """

    index: int
    arrival_s: float
    sent_s: float | None
    end_s: float
    chunk_times_s: np.ndarray = field(default_factory=partial(np.empty, 0))
    chunk_tokens: np.ndarray = field(default_factory=_no_counts)
    chunk_sequences: np.ndarray = field(default_factory=_no_counts)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """Output tokens of all sequences together."""
        return int(self.chunk_tokens.sum())

    @property
    def output_len(self) -> int:
        """Tokens of the longest sequence."""
        return int(np.bincount(self.chunk_sequences, self.chunk_tokens).max()) if len(self.chunk_tokens) else 0

    @property
    def latency_s(self) -> float:
        """From the arrival to the end."""
        return self.end_s - self.arrival_s

    @property
    def normalized_latency_s(self) -> float | None:
        """End-to-end latency by tokens of output, as the paper's section 6.1 has it; None without output."""
        return self.latency_s / self.output_len if self.output_len else None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None without output."""
        return float(self.chunk_times_s[0]) - self.arrival_s if len(self.chunk_times_s) else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first one, of the longest sequence; None if it has a single token, or if all
        of its tokens came at once."""
        length = self.output_len
        if length < 2:
            return None
        longest = np.bincount(self.chunk_sequences, self.chunk_tokens).argmax()
        times = self.chunk_times_s[self.chunk_sequences == longest]
        return float(times[-1] - times[0]) / (length - 1) if len(times) > 1 else None

    def gaps_s(self) -> np.ndarray:
        """float64: the times between neighbouring chunks of each sequence, which a reader sees as pauses."""
        # Sorted by sequence, in order of time within each.
        order = np.argsort(self.chunk_sequences, kind="stable")
        same = np.diff(self.chunk_sequences[order]) == 0
        return np.diff(self.chunk_times_s[order])[same]
