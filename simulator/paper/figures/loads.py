"""The loads of the figures."""

from quire.load import alpaca, sharegpt
from simulator.paper.systems import OPT_13B, OPT_66B, OPT_175B, Load, Setup

MAX_MODEL_LEN, VOCAB_SIZE = 2048, 50272
"""OPT's limits."""

_NUM_SATURATING = {OPT_13B: (220, 1500), OPT_66B: (150, 900), OPT_175B: (600, 4000)}
"""Requests of ShareGPT's and Alpaca's lengths that fill the pool several times."""


def sharegpt_load(setup: Setup, *, n: int = 1, beam_width: int | None = None) -> Load:
    """Ninety seconds of chats; the paper's traces have an hour, or a quarter of one for OPT-175B."""
    return Load(sharegpt(MAX_MODEL_LEN, VOCAB_SIZE), 90, _NUM_SATURATING[setup][0], n, beam_width)


def alpaca_load(setup: Setup, *, n: int = 1, beam_width: int | None = None) -> Load:
    """Twenty seconds of instructions: in lengths of a request, as long as the chats."""
    return Load(alpaca(MAX_MODEL_LEN, VOCAB_SIZE), 20, _NUM_SATURATING[setup][1], n, beam_width)
