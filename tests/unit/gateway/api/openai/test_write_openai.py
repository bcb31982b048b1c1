"""Log probabilities in the answers of completions and chat completions, and tokens as text and bytes."""

import json
import math

import pytest

from gateway.api.answer_parts import chat_logprobs
from gateway.api.answers import as_json
from gateway.api.openai.write_openai import CompletionLogprobs, completion_logprobs, prompt_logprobs
from gateway.replicas.events import Logprob, PositionLogprobs
from gateway.text.tokenizer import TokenTexts
from tests.support.tokenizers import byte_fallback, byte_level, byte_level_bytes, wrapped

CAT = byte_level().encode(" cat", add_special_tokens=False).ids
SMILE = [byte_level_bytes()[byte] for byte in "😀".encode()]


def entry(token_id: int, logprob: float = -0.5, *top: tuple[int, float]) -> PositionLogprobs:
    ranked = tuple(Logprob(each, value, rank) for rank, (each, value) in enumerate(top, start=1))
    return PositionLogprobs(Logprob(token_id, logprob, 9), ranked)


@pytest.fixture
def texts() -> TokenTexts:
    return TokenTexts(wrapped(byte_level()))


class Completion:
    """A choice, each piece of it as it is written."""

    def __init__(self, shaper: CompletionLogprobs) -> None:
        self._shaper = shaper

    def shape(self, token_ids, logprobs):
        return written(completion_logprobs((self._shaper, token_ids, logprobs)))


def completion(texts, num_top=1, **fields) -> Completion:
    detokenizer = wrapped(byte_level()).detokenizer(include_special_tokens=False)
    return Completion(CompletionLogprobs(texts, detokenizer, num_top, **fields))


def written(shaped):
    return json.loads(as_json(shaped))


def test_offsets_count_characters_and_go_on_from_chunk_to_chunk(texts):
    shaper = completion(texts, text_offset=10)
    token_ids = [*SMILE, *CAT]
    whole = completion(texts, text_offset=10).shape(token_ids, [entry(each) for each in token_ids])
    assert whole["text_offset"][: len(SMILE) + 1] == [10, 10, 10, 10, 11]
    pieces = [shaper.shape([each], [entry(each)]) for each in token_ids]
    assert [piece["text_offset"][0] for piece in pieces] == whole["text_offset"]


def test_the_chosen_token_is_among_the_top_ones_even_where_it_ranks_below(texts):
    (a, b, c) = (byte_level_bytes()[byte] for byte in b"abc")
    shaped = completion(texts, 2).shape([c], [entry(c, -7.0, (a, -1.0), (b, -2.0))])
    assert shaped["top_logprobs"] == [{"a": -1.0, "b": -2.0, "c": -7.0}]
    assert shaped["token_logprobs"] == [-7.0]


def test_what_is_excluded_has_a_number_that_json_can_write(texts):
    position = entry(CAT[0], -math.inf, (CAT[0], -math.inf))
    for shaped in (
        completion(texts).shape(CAT[:1], [position]),
        written(chat_logprobs(texts, [position])),
        written(prompt_logprobs(texts, [position], 1)),
    ):
        assert "-9999.0" in json.dumps(shaped, allow_nan=False)


def test_chat_entries_have_the_token_s_bytes(texts):
    position = entry(SMILE[0], -0.5, (SMILE[0], -0.5), (CAT[0], -3.0))
    (shaped,) = written(chat_logprobs(texts, [position]))["content"]
    assert (shaped["token"], shaped["bytes"], shaped["logprob"]) == ("\N{REPLACEMENT CHARACTER}", [0xF0], -0.5)
    assert [top["bytes"] for top in shaped["top_logprobs"]] == [[0xF0], list(texts.bytes_of(CAT[0]))]


def test_prompt_entries_are_by_token_id_and_the_first_has_none(texts):
    shaped = written(prompt_logprobs(texts, [entry(CAT[0], -4.0, (SMILE[0], -1.0))], 1))
    assert shaped == [
        None,
        {
            str(CAT[0]): {"logprob": -4.0, "rank": 9, "decoded_token": texts.text_of(CAT[0])},
            str(SMILE[0]): {"logprob": -1.0, "rank": 1, "decoded_token": "\N{REPLACEMENT CHARACTER}"},
        },
    ]


def load(tokenizer) -> TokenTexts:
    return TokenTexts(wrapped(tokenizer))


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
async def test_the_bytes_of_a_text_s_tokens_are_the_text_s(make):
    tokenizer = make()
    texts = load(tokenizer)
    for text in ("the cat sat", "naïve café 😀👍🏽", "你好", "a\nb", "x\N{REPLACEMENT CHARACTER}y"):
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(map(texts.bytes_of, token_ids)).decode().removeprefix(" ") == text


async def test_byte_tokens_of_a_fallback_vocabulary_are_bytes():
    tokenizer = byte_fallback()
    texts, vocabulary = load(tokenizer), tokenizer.get_vocab()
    for byte in range(256):
        assert texts.bytes_of(vocabulary[f"<0x{byte:02X}>"]) == bytes([byte])


async def test_parts_of_characters_have_keys_of_their_own():
    texts = load(byte_level())
    first, second = (byte_level_bytes()[byte] for byte in (0xF0, 0x9F))
    assert texts.text_of(first) == texts.text_of(second) == "\N{REPLACEMENT CHARACTER}"
    assert texts.key_of(first) == "bytes:\\xf0"
    assert texts.key_of(second) == "bytes:\\x9f"
    assert json.loads(json.dumps(texts.key_of(first))) == "bytes:\\xf0"


def test_special_tokens_take_no_room_in_the_text(texts):
    eos = byte_level().get_vocab()["</s>"]
    shaped = completion(texts).shape([eos, *CAT], [entry(eos), *map(entry, CAT)])
    assert shaped["text_offset"][:2] == [0, 0]
    assert shaped["tokens"][0] == "</s>"


def test_more_top_tokens_than_wanted_are_cut(texts):
    (a, b, c) = (byte_level_bytes()[byte] for byte in b"abc")
    shaped = completion(texts, 1).shape([a], [entry(a, -1.0, (a, -1.0), (b, -2.0), (c, -3.0))])
    assert shaped["top_logprobs"] == [{"a": -1.0}]
    # As in vLLM: the generated token is there, also if no likely ones are asked for.
    assert completion(texts, 0).shape([a], [entry(a, -1.0)])["top_logprobs"] == [{"a": -1.0}]


def test_the_generated_token_is_among_those_that_a_chat_names(texts):
    (a, b) = (byte_level_bytes()[byte] for byte in b"ab")
    shown = [entry(a, -1.0, (b, -2.0)), entry(a, -1.0, (a, -1.0))]
    tops = [each["top_logprobs"] for each in written(chat_logprobs(texts, shown, shows_chosen=True))["content"]]
    assert [[top["token"] for top in each] for each in tops] == [["a", "b"], ["a"]]


def test_a_token_without_log_probability_has_null(texts):
    shaped = completion(texts).shape(CAT[:1], [None])
    assert (shaped["token_logprobs"], shaped["top_logprobs"]) == ([None], [None])
