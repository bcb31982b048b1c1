"""Blocks of 16 tokens beside pages of 2 MiB, as virtually contiguous KV has them, on the paper's loads.

Quire's scheduler in virtual time, with blocks of either size and nothing else changed: `--page-tokens` tokens of one
layer of OPT-13B (40 heads of 128, 16 bits) take 2 MiB. All requests come at once.
"""

import argparse
import math
from dataclasses import replace

from quire.load import Lognormal, shared_prefix
from simulator.paper.figures.loads import alpaca_load, sharegpt_load
from simulator.paper.systems import LLAMA_13B, OPT_13B, QUIRE, Job, Load, Setup, run

_MIB = 1 << 20
_PREFIX, _PROMPT, _OUTPUT = 341, Lognormal.fit(30, 0.6), Lognormal.fit(40, 0.6)
"""As of figure 16."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--page-tokens", type=int, default=2 * _MIB // (40 * 128 * 2))


def main(arguments: argparse.Namespace) -> None:
    print(
        f"{'load':<24} {'block':>6} {'served':>9} {'running':>8} {'tokens of held':>16} {'saved':>7} {'preempted':>10}"
    )
    for name, setup, load in _loads():
        for block_size in (16, arguments.page_tokens):
            point = run(Job(QUIRE, setup, load, math.inf, block_size=block_size))
            shares = point.shares
            print(
                f"{name:<24} {block_size:>6} {point.served_rate:>9.2f} {point.batched:>8.1f} "
                f"{shares.tokens_of_held:>16.1%} {shares.saved:>7.1%} {point.preemptions:>10.2f}",
                flush=True,
            )


def _loads() -> list[tuple[str, Setup, Load]]:
    prefix = Load(shared_prefix(_PREFIX, _PROMPT, _OUTPUT, 2048, 32_000), 15, 1000, shares_prefixes=True)
    return [
        ("ShareGPT", OPT_13B, sharegpt_load(OPT_13B)),
        ("ShareGPT, 4 samples", OPT_13B, sharegpt_load(OPT_13B, n=4)),
        ("Alpaca", OPT_13B, alpaca_load(OPT_13B)),
        ("Alpaca, 4 beams", OPT_13B, replace(alpaca_load(OPT_13B, beam_width=4), num_saturating=1500)),
        (f"one prefix of {_PREFIX}", LLAMA_13B, prefix),
    ]
