"""Words that must not be generated, as the token sequences that spell them."""

from collections.abc import Sequence

from gateway.text.tokenizer import Tokenizer
from quire.rpc.errors import invalid_field


async def bad_token_sequences(
    tokenizer: Tokenizer, bad_words: Sequence[str], vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as it is tokenized at the start of a text and after a space, where that differs; each sequence once.

    A tokenizer may know more tokens than the model, whose are below `vocab_size`; what needs one of them cannot be
    generated anyway and is left out.

    Raises:
        InvalidArgument: the tokenizer makes no token of a word.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for position, word in enumerate(bad_words):
        text = word.lstrip() or word
        for spelled in (text, f" {text}"):
            token_ids = tuple(await tokenizer.encode(spelled, add_special_tokens=False))
            if not token_ids:
                field, description = f"sampling.bad_words[{position}]", "has no tokens; at least 1 is needed"
                raise invalid_field(field, description)
            if max(token_ids) < vocab_size:
                sequences[token_ids] = None
    return tuple(sequences)
