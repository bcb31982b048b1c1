"""What transformers generates greedily: the truth for the served output."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


def generate_greedily(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any
) -> list[list[int]]:
    """`max_tokens` greedy tokens for each prompt, by the model's own `generate` with `options`; eos ends nothing.

    Prompts of one length share a batch, so that nothing is padded.
    """
    model.generation_config.eos_token_id = None
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, prompt in enumerate(prompts):
        by_length[len(prompt)].append(index)
    outputs: list[list[int]] = [[] for _ in prompts]
    for length, indices in by_length.items():
        batch = torch.tensor([list(prompts[index]) for index in indices])
        with torch.inference_mode():
            generated = model.generate(  # pyright: ignore[reportCallIssue]
                batch,
                attention_mask=torch.ones_like(batch),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        for index, row in zip(indices, generated[:, length:].tolist(), strict=True):
            outputs[index] = row
    return outputs
