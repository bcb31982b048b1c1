"""Log probabilities at many positions, as arrays inside messages: a long prompt has thousands of them."""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from quire.arrays import decode_float32, decode_int32, encode_float32, encode_int32
from quire.rpc.errors import InvalidArgument


class LogprobMessage(Protocol):
    """A message with the fields that `LogprobColumns` fills and reads."""

    chosen_logprobs: bytes
    chosen_ranks: bytes
    top_token_ids: bytes
    top_logprobs: bytes


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log probabilities at m positions, of the token that stands there and of the k most likely ones, best first."""

    chosen_logprobs: NDArray[np.float32]
    """[m]"""
    chosen_ranks: NDArray[np.int32]
    """[m], 1 for the most likely token."""
    top_token_ids: NDArray[np.int32]
    """[m, k]"""
    top_logprobs: NDArray[np.float32]
    """[m, k]"""

    def __len__(self) -> int:
        """How many positions."""
        return len(self.chosen_logprobs)

    @property
    def size(self) -> int:
        """How many log probabilities."""
        return len(self) + self.top_logprobs.size

    def without_first(self, num_positions: int) -> Self:
        """Those behind the first positions."""
        return type(self)(
            self.chosen_logprobs[num_positions:],
            self.chosen_ranks[num_positions:],
            self.top_token_ids[num_positions:],
            self.top_logprobs[num_positions:],
        )

    def encode(self, message: LogprobMessage) -> None:
        """Fills the message's fields."""
        message.chosen_logprobs = encode_float32(self.chosen_logprobs)
        message.chosen_ranks = encode_int32(self.chosen_ranks)
        message.top_token_ids = encode_int32(self.top_token_ids)
        message.top_logprobs = encode_float32(self.top_logprobs)

    @classmethod
    def decode(cls, message: LogprobMessage, *, vocab_size: int | None = None) -> Self:
        """What the message's fields hold, as read-only views of them.

        Raises:
            InvalidArgument: the fields do not fit each other, or an id is not in the vocabulary.
        """
        chosen = decode_float32(message.chosen_logprobs, "chosen_logprobs")
        ranks = decode_int32(message.chosen_ranks, "chosen_ranks", minimum=1)
        top_ids = decode_int32(message.top_token_ids, "top_token_ids", minimum=0, below=vocab_size)
        top = decode_float32(message.top_logprobs, "top_logprobs")
        if not len(chosen) or len(ranks) != len(chosen) or len(top_ids) != len(top) or len(top) % len(chosen):
            raise InvalidArgument(
                f"log probabilities of {len(chosen)} positions come with {len(ranks)} ranks, {len(top_ids)} top token "
                f"ids and {len(top)} top log probabilities"
            )
        return cls(chosen, ranks, top_ids.reshape(len(chosen), -1), top.reshape(len(chosen), -1))
