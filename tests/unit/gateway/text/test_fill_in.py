"""Prompts of a text before and one after the answer."""

import copy

import pytest

from gateway.offload import FairExecutor
from gateway.text.fill_in import fill_in_prompt
from gateway.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (
            ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
            "<|fim_prefix|>def f(<|fim_suffix|>): pass<|fim_middle|>",
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]): pass[PREFIX]def f("),
        (("<|fim_prefix|>", "<|fim_middle|>"), None),
        ((), None),
    ],
)
def test_a_prompt_is_in_the_tokens_that_the_model_has(tokens, prompt):
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_special_tokens(list(tokens))
    assert fill_in_prompt(Tokenizer(tokenizer, FairExecutor(1)), "def f(", "): pass") == prompt
