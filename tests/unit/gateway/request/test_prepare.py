"""Bad words become all the token sequences that spell them."""

import pytest
from tokenizers import Tokenizer, normalizers

from gateway.request.prepare import bad_token_sequences
from quire.rpc.errors import InvalidArgument
from tests.support.tokenizers import byte_level, wrapped


def ids_of(text):
    return tuple(byte_level().encode(text, add_special_tokens=False).ids)


async def test_a_word_is_banned_at_the_start_and_after_a_space():
    found = await bad_token_sequences(wrapped(byte_level()), ["cat", " cat", "the"], 2048)
    assert found == tuple(dict.fromkeys(map(ids_of, ("cat", " cat", "the", " the"))))
    assert len(found) > 2


async def test_spaces_alone_are_a_word():
    assert ids_of("  ") in await bad_token_sequences(wrapped(byte_level()), ["  "], 2048)


async def test_no_words_are_no_sequences():
    assert await bad_token_sequences(wrapped(byte_level()), [], 2048) == ()


async def test_a_word_without_tokens_is_refused_by_name():
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.Replace("\u00ad", "")
    with pytest.raises(InvalidArgument) as raised:
        await bad_token_sequences(wrapped(tokenizer), ["cat", "\u00ad"], 2048)
    assert raised.value.violations[0].field == "sampling.bad_words[1]"


async def test_what_the_model_has_no_tokens_for_is_left_out():
    limit = max(ids_of(" cat"))
    assert await bad_token_sequences(wrapped(byte_level()), ["cat"], limit) == (ids_of("cat"),)
