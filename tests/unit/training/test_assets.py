"""The files of assets/quire-tiny fit together, and fit the corpus that trained them."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

from assets.training.corpus import (
    BOS_ID,
    CHAT_TEMPLATE,
    END_ID,
    EOS_ID,
    SPECIAL_TOKENS,
    Conversation,
    Turn,
    chat_document,
    documents,
)
from assets.training.tokenizer import JSON_MARKS, VOCABULARY_SIZE, add_json_marks
from assets.training.train import make_model, widen

DIRECTORY = Path(__file__).parents[3] / "assets" / "quire-tiny"


def read_json(name: str) -> dict[str, Any]:
    return json.loads((DIRECTORY / name).read_text())


def narrow_tokenizer() -> Tokenizer:
    """The shipped one without its marks, as the first course has it."""
    content = read_json("tokenizer.json")
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL_TOKENS)]
    return Tokenizer.from_str(json.dumps(content))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DIRECTORY / "tokenizer.json"))


def test_special_tokens_have_the_ids_that_the_corpus_assumes(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode("Once upon a time").ids[0] == BOS_ID
    assert tokenizer.get_vocab_size() == read_json("config.json")["vocab_size"]


def test_marks_of_calls_and_json_are_tokens_that_no_document_of_the_first_course_has(tokenizer: Tokenizer) -> None:
    marks = [tokenizer.encode(mark, add_special_tokens=False).ids for mark in JSON_MARKS]
    assert marks == [[VOCABULARY_SIZE + index] for index in range(len(JSON_MARKS))]
    for document in islice(documents(seed=8), 300):
        for segment in document:
            assert max(tokenizer.encode(segment.text, add_special_tokens=False).ids) < VOCABULARY_SIZE


def test_a_wider_model_says_what_the_narrow_one_did_and_knows_the_pieces_of_its_marks() -> None:
    torch.manual_seed(1)
    model, before, after = make_model(), narrow_tokenizer(), narrow_tokenizer()
    add_json_marks(after)
    tokens = torch.tensor([before.encode("Hello, Quire!").ids])
    expected = model(tokens).logits
    widen(model, before, after)
    assert torch.equal(model(tokens).logits[..., :VOCABULARY_SIZE], expected)
    pieces = before.encode(JSON_MARKS[0], add_special_tokens=False).ids
    weights = model.get_parameter("model.embed_tokens.weight")
    assert weights.shape[0] == model.config.vocab_size == VOCABULARY_SIZE + len(JSON_MARKS)
    torch.testing.assert_close(weights[VOCABULARY_SIZE], weights[pieces].mean(0))


def test_both_ends_stop_an_answer_and_greedy_decoding_is_the_default() -> None:
    assert read_json("generation_config.json")["do_sample"] is False
    assert read_json("generation_config.json")["eos_token_id"] == [EOS_ID, END_ID]
    assert read_json("config.json")["eos_token_id"] == [EOS_ID, END_ID]


@pytest.mark.parametrize("text", ["Hello, Quire!", "naïve café", "日本語 🙂", "tab\tand\nline", "  two  spaces  "])
def test_every_text_survives_encoding(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("12 + 345", add_special_tokens=False).tokens
    assert [token for token in tokens if token.isdigit()] == ["1", "2", "3", "4", "5"]


def test_chat_template_writes_what_the_model_was_trained_on() -> None:
    assert read_json("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE
    template = jinja2.Environment().from_string(CHAT_TEMPLATE)
    conversation = Conversation("any", (Turn("Hi", "Hello!"), Turn("Bye", "Goodbye!")), system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in conversation.turns:
        messages += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.assistant}]
    trained = "".join(segment.text for segment in chat_document(conversation))
    assert template.render(messages=messages, bos_token="<s>") == trained
    prompt = template.render(messages=messages[:-1], bos_token="<s>", add_generation_prompt=True)
    assert trained.startswith(prompt)


def test_segments_encode_as_their_whole_document_does(tokenizer: Tokenizer) -> None:
    for document in islice(documents(seed=8), 300):
        apart = [i for segment in document for i in tokenizer.encode(segment.text, add_special_tokens=False).ids]
        whole = tokenizer.encode("".join(segment.text for segment in document), add_special_tokens=False).ids
        assert apart == whole


def test_files_are_small_enough_to_ship() -> None:
    assert (DIRECTORY / "model.safetensors").stat().st_size < 8_000_000
    assert (DIRECTORY / "heldout.txt").stat().st_size < 100_000
