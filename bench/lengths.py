"""Lengths of prompts and outputs as in the paper's two data sets: lognormal around the means of its figure 11."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Prompts and outputs with lognormal lengths, in tokens; a coefficient of variation is deviation / mean.

    A prompt has at most half of `longest`, an output what the prompt leaves of it, so the means that are drawn lie a
    little below those asked for; `describe` says what was drawn. The outputs of ShareGPT have a coefficient of
    variation of about 1, its prompts one somewhat above.
    """

    name: str
    prompt_mean: float
    output_mean: float
    longest: int
    prompt_variation: float = 1.3
    output_variation: float = 1.0

    def draw(self, count: int, seed: int = 0) -> np.ndarray:
        """int64[count, 2]: tokens of the prompt and of the output. The same for the same arguments.

        Raises ValueError where `longest` leaves no room for both.
        """
        if self.longest < 2:
            raise ValueError(f"longest is {self.longest}, must be at least 2: one token of a prompt, one of an output")
        rng = np.random.default_rng(seed)
        prompt = _lognormal(rng, self.prompt_mean, self.prompt_variation, count)
        output = _lognormal(rng, self.output_mean, self.output_variation, count)
        prompt = np.clip(prompt, 1, self.longest // 2)
        return np.stack((prompt, np.clip(output, 1, self.longest - prompt)), axis=1)


def sharegpt(longest: int) -> LengthMix:
    """Chats: long answers to prompts that carry some history."""
    return LengthMix("ShareGPT", prompt_mean=161, output_mean=338, longest=longest)


def alpaca(longest: int) -> LengthMix:
    """Instructions: one sentence in, some sentences out."""
    return LengthMix("Alpaca", prompt_mean=19, output_mean=58, longest=longest, prompt_variation=0.5)


def lognormal_sigma(variation: float) -> float:
    """The sigma of the lognormal with this coefficient of variation."""
    return math.sqrt(math.log1p(variation**2))


def describe(lengths: np.ndarray) -> dict[str, float]:
    """Means and coefficients of variation of what `LengthMix.draw` gave."""
    mean, deviation = lengths.mean(axis=0), lengths.std(axis=0)
    names = ("prompt", "output")
    facts = {f"{name}_mean": float(mean[i]) for i, name in enumerate(names)}
    return facts | {f"{name}_variation": float(deviation[i] / mean[i]) for i, name in enumerate(names)}


def _lognormal(rng: np.random.Generator, mean: float, variation: float, count: int) -> np.ndarray:
    sigma = lognormal_sigma(variation)
    # The mean of a lognormal is exp(mu + sigma^2 / 2).
    values = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, count)
    return np.rint(values).astype(np.int64)
