"""Prompts of real text with given lengths: what quire-tiny was tested by, cut to measure."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from quire.model_source import resolve_model


def real_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """One prompt of each length, in tokens of quire-tiny. Each starts with another of the held-out documents and goes
    on with those that follow."""
    directory = resolve_model(None)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    documents = (directory / "heldout.txt").read_text().split("\n\n")
    tokens = [tokenizer.encode(f"{text}\n\n", add_special_tokens=False).ids for text in documents]
    (start_of_text,) = tokenizer.encode("<s>", add_special_tokens=False).ids
    return [[start_of_text, *_from_document(tokens, index, length - 1)] for index, length in enumerate(lengths)]


def _from_document(tokens: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """The first `length` tokens of the documents from this one on, in a circle."""
    prompt: list[int] = []
    while len(prompt) < length:
        prompt += tokens[first % len(tokens)]
        first += 1
    return prompt[:length]
