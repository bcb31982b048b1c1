"""Which replica takes a request: the one that likely has its prefix cached, unless it is much busier than others."""

import math
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

# Requests that agree on this many blocks go to the same replica. More would tear apart requests that share less.
_AFFINITY_BLOCKS = 4
# A replica may have this many times its fair share of live requests (consistent hashing with bounded loads).
_HEADROOM = 1.25


def affinity_key(prompt_token_ids: NDArray[np.int32], block_size: int) -> bytes:
    """What prompts with the same first blocks have in common. A prompt of less than one block is its own key."""
    num_tokens = len(prompt_token_ids)
    whole_blocks = min(num_tokens // block_size, _AFFINITY_BLOCKS)
    end = whole_blocks * block_size if whole_blocks else num_tokens
    return blake2b(prompt_token_ids[:end].astype("<i4").tobytes(), digest_size=16).digest()


def choose_replica(key: bytes, loads: Mapping[str, int]) -> str:
    """The best replica by rendezvous hashing among those with room.

    When a replica joins or leaves, only the keys move that it gains or loses.

    Args:
        key: From `affinity_key`.
        loads: For each replica that can take the request, its number of live requests. Not empty.
    """
    capacity = math.ceil(_HEADROOM * (sum(loads.values()) + 1) / len(loads))
    ranked = sorted(loads, key=lambda replica: blake2b(replica.encode(), key=key, digest_size=8).digest())
    return next(replica for replica in ranked if loads[replica] < capacity)
