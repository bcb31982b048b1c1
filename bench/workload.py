"""Requests shaped like chat traffic: lognormal lengths of prompts and outputs, token ids drawn at random."""

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A prompt and how many tokens to generate."""

    prompt: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Means of the lognormal lengths, in tokens, and the cut above."""

    prompt_mean: float = 161.0
    output_mean: float = 338.0
    prompt_sigma: float = 1.0
    output_sigma: float = 0.6
    longest: int = 1024


def draw_workload(num_requests: int, vocab_size: int, lengths: Lengths, seed: int = 0) -> list[WorkItem]:
    """The same list for the same arguments."""
    rng = random.Random(seed)

    def draw(mean: float, sigma: float) -> int:
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        value = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return int(min(max(4, value), lengths.longest))

    items = []
    for _ in range(num_requests):
        prompt_len = draw(lengths.prompt_mean, lengths.prompt_sigma)
        output_len = draw(lengths.output_mean, lengths.output_sigma)
        prompt = [rng.randrange(10, vocab_size - 10) for _ in range(prompt_len)]
        items.append(WorkItem(prompt, output_len))
    return items
