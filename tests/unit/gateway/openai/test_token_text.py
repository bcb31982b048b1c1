"""Single tokens as bytes and text."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models

from gateway.openai.token_text import TokenTexts
from quire.model_directory import resolve_model
from tests.support.tokenizers import byte_fallback, byte_level, byte_level_bytes, wrapped


async def load(tokenizer) -> TokenTexts:
    return await TokenTexts.load(wrapped(tokenizer))


async def test_every_byte_of_a_byte_level_vocabulary_is_itself():
    texts = await load(byte_level())
    for byte, token_id in byte_level_bytes().items():
        assert texts.bytes_of(token_id) == bytes([byte])


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
async def test_the_bytes_of_a_text_s_tokens_are_the_text_s(make):
    tokenizer = make()
    texts = await load(tokenizer)
    for text in ("the cat sat", "naïve café 😀👍🏽", "你好", "a\nb", "x\N{REPLACEMENT CHARACTER}y"):
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(texts.bytes_of, token_ids)).decode().removeprefix(" ") == text


async def test_the_embedded_model_s_tokens():
    tokenizer = tokenizers.Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
    texts = await load(tokenizer)
    token_ids = tokenizer.encode("Once upon 🙂").ids
    assert b"".join(map(texts.bytes_of, token_ids)) == b"<s>" + "Once upon 🙂".encode()


async def test_byte_tokens_of_a_fallback_vocabulary_are_bytes():
    tokenizer = byte_fallback()
    texts = await load(tokenizer)
    for byte in range(256):
        assert texts.bytes_of(tokenizer.token_to_id(f"<0x{byte:02X}>")) == bytes([byte])


async def test_a_token_keeps_the_space_that_it_begins_with():
    texts = await load(byte_fallback())
    assert texts.text_of(byte_fallback().token_to_id("▁the")) == " the"


async def test_special_tokens_have_their_names():
    for make in (byte_level, byte_fallback):
        texts = await load(make())
        assert texts.text_of(make().token_to_id("</s>")) == "</s>"


async def test_unknown_ids_are_empty():
    texts = await load(byte_level())
    assert texts.bytes_of(5000) == b""
    assert texts.text_of(5000) == texts.key_of(5000) == ""


async def test_parts_of_characters_have_keys_of_their_own():
    texts = await load(byte_level())
    first, second = (byte_level_bytes()[byte] for byte in (0xF0, 0x9F))
    assert texts.text_of(first) == texts.text_of(second) == "\N{REPLACEMENT CHARACTER}"
    assert texts.key_of(first) == "bytes:\\xf0"
    assert texts.key_of(second) == "bytes:\\x9f"
    assert json.loads(json.dumps(texts.key_of(first))) == "bytes:\\xf0"


async def test_a_vocabulary_without_the_anchor_works():
    tokenizer = tokenizers.Tokenizer(models.BPE({"b": 0, "c": 1}, []))
    tokenizer.decoder = decoders.Fuse()
    texts = await load(tokenizer)
    assert [texts.text_of(0), texts.text_of(1)] == ["b", "c"]
