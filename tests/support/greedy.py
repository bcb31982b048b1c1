"""What transformers says greedily: the truth for the served output."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel


@torch.inference_mode()
def likeliest_after(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> list[list[int]]:
    """For each token of each output, the one that the model finds likeliest there. They are the outputs themselves if
    these are greedy, which takes one call of the model for all prompts of a length, and `generate` one for each token.
    """
    found: list[list[int]] = [[] for _ in prompts]
    for length, indices in _by_length(prompts).items():
        batch = torch.tensor([[*prompts[index], *outputs[index]] for index in indices])
        likeliest = model(batch).logits[:, length - 1 : -1].argmax(-1)
        for index, row in zip(indices, likeliest.tolist(), strict=True):
            found[index] = row
    return found


def _by_length(prompts: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    indices: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        indices[len(prompt)].append(index)
    return indices
