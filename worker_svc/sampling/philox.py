"""Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A number depends on its key and counter only, so a sample is a function of (seed, position, logits): not of the batch,
the rank, or what the process did before. It runs on the host, vectorised over rows, because seeds and positions are
known there before the model runs.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Four 32-bit words for each counter.

    Args:
        counter: [n, 4] words below 2**32.
        key: [n, 2] words below 2**32.

    Returns:
        [n, 4] words below 2**32, as uint64.
    """
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack((c0, c1, c2, c3), axis=1)


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.integer]) -> NDArray[np.float64]:
    """One number in [0, 1) of 53 random bits for each (seed, position).

    Args:
        seeds: [n], the key; its low word comes first.
        positions: [n], not negative; the first word of the counter, the others are zero.
    """
    counter = np.zeros((len(seeds), 4), dtype=np.uint64)
    counter[:, 0] = positions
    key = np.stack((seeds & _LOW, seeds >> _HALF), axis=1)
    words = philox4x32(counter, key)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    return (high * np.uint64(1 << 26) + low).astype(np.float64) * 2.0**-53
