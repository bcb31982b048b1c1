"""The requests of a long run: every kind, with short lengths, in an order that the seed decides."""

import random
from collections.abc import Iterator, Mapping

from bench.rule_source import VOCAB_SIZE, key_of
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.request import Request, RowSampling

SHARES: Mapping[str, float] = {
    "greedy": 0.5,
    "stops": 0.15,
    "prefix": 0.2,
    "samples": 0.08,
    "best_of": 0.04,
    "beams": 0.03,
}
"""Shares of all requests by kind."""
_NUM_TENANTS = 5
_ONE_TIME_TENANTS = 0.01
_NUM_PREFIXES, _PREFIX_LEN = 64, 24


def prefixes(seed: int) -> list[list[int]]:
    """Prefixes that many prompts share."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(_PREFIX_LEN)] for _ in range(_NUM_PREFIXES)]


def requests(count: int, seed: int) -> Iterator[Request]:
    """`count` requests with keys from 0 on. The same for the same arguments."""
    rng, shared = random.Random(seed), prefixes(seed)
    for index in range(count):
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        yield _request(index, kind, shared, rng)


def _request(index: int, kind: str, shared: list[list[int]], rng: random.Random) -> Request:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
    if kind == "prefix":
        prompt = rng.choice(shared) + prompt
    width = rng.randint(2, 4) if kind in ("samples", "best_of", "beams") else 1
    comes_once = rng.random() < _ONE_TIME_TENANTS
    return Request(
        key_of(index),
        str(index),
        prompt,
        RowSampling(seed=index),
        max_tokens=rng.randint(1, 24),
        stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), 4)) if kind in ("stops", "beams") else frozenset(),
        tenant=f"once {index}" if comes_once else tenant(index),
        num_sequences=width,
        num_returned=1 if kind in ("best_of", "beams") else width,
        priority=rng.randint(-2, 2),
        beam=BeamParameters(width) if kind == "beams" else None,
    )


def tenant(index: int) -> str:
    """A tenant that comes again and again."""
    return f"tenant {index % _NUM_TENANTS}"
