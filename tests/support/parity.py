"""Compares a model's logits with the logits of transformers, over several ways to feed the tokens."""

import torch
from transformers import PreTrainedModel

from tests.support.models import VOCAB_SIZE
from tests.support.paged import PagedRunner, Span
from worker_svc.models.base import CausalLM

TOLERANCE = 1e-4


def make_sequences(*lengths: int) -> list[list[int]]:
    """Random token ids, the same in each call."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def expected_logits(reference: PreTrainedModel, sequence: list[int]) -> torch.Tensor:
    """Logits of all tokens of one sequence."""
    return reference(torch.tensor([sequence])).logits[0].float()


def assert_serves_like(reference: PreTrainedModel, model: CausalLM) -> None:
    """Compares sequences longer than all sliding windows: in chunks, in a batch, token by token, in two block sizes,
    and after a prefix that another sequence computed."""
    first, *others = make_sequences(60, 1, 17)
    sequences = [first, *others, [*first[:32], *others[-1]]]
    expected = [expected_logits(reference, sequence) for sequence in sequences]
    small, large = (PagedRunner(model, sequences, block_size=size, seed=size) for size in (5, 16))
    large.share_blocks(0, 3, num_blocks=2)
    for runner, *spans in (
        (small, Span(0, 0, 30), Span(1, 0, 1), Span(2, 0, 16)),
        (small, Span(2, 16, 17), Span(0, 30, 59)),
        (small, Span(0, 59, 60)),
        *((large, Span(0, start, end)) for start, end in ((0, 1), (1, 8), (8, 33), (33, 34), (34, 40))),
        (large, Span(2, 0, 9), Span(0, 40, 41), Span(1, 0, 1)),
        (large, Span(3, 32, 49), Span(0, 41, 42)),
    ):
        actual, wanted = runner.step(*spans), torch.cat([expected[each.row][each.start : each.end] for each in spans])
        torch.testing.assert_close(actual, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(actual.argmax(-1), wanted.argmax(-1))
