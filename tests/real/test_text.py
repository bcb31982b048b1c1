"""Texts of real vocabularies: the shown prompt and its answer together are the text of all tokens."""

import random

import pytest

from gateway.offload import FairExecutor
from gateway.text.tokenizer import Tokenizer
from quire.model_files.model_directory import ModelDirectory
from tests.real.models import real_model

pytestmark = pytest.mark.real

TEXTS = (
    "Hello the cat sat  on\n\n the mat, 'tis n't . done ! ",
    "  你好世界 👍🏽 naïve café \N{REPLACEMENT CHARACTER} x",
    "def f(x):\n\treturn x  # yes\n",
)
CHARACTERS = ("😀", "你", "é", "\N{REPLACEMENT CHARACTER}")
SEQUENCES = 24
SENTENCEPIECE = ("llama2", "mistral_v1", "mistral_v3", "mistral_v7")
# Every kind of decoder, with and without tokens of single bytes.
NAMES = (*SENTENCEPIECE, "gemma", "internlm2", "qwen3", "deepseek_v3", "mistral_nemo")


def opened(name: str) -> Tokenizer:
    return Tokenizer.open(ModelDirectory.open(real_model(name)), FairExecutor(1))


async def drawn(tokenizer: Tokenizer, seed: str) -> list[list[int]]:
    """Sequences of tokens of texts, of parts of characters, of special tokens and of the whole vocabulary."""
    draw = random.Random(seed)
    texts = [await tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    parts = [token for text in CHARACTERS for token in await tokenizer.encode(text, add_special_tokens=False)]
    kinds = [
        [*texts[0], *texts[1], *texts[2]],
        parts,
        [*tokenizer.special_tokens.values(), 0],
        range(tokenizer.size + 2),
    ]

    def sequence() -> list[int]:
        weights = draw.choice([(6, 3, 0, 1), (1, 1, 1, 1), (1, 4, 0, 0), (0, 1, 1, 8)])
        return [draw.choice(draw.choices(kinds, weights)[0]) for _ in range(draw.randrange(1, 20))]

    return [*texts, *(sequence() for _ in range(SEQUENCES))]


def is_invalid(tokenizer: Tokenizer, token_ids: list[int], *, special: bool) -> bool:
    """Whether a decoder of bytes replaces a run of them because one is invalid, which takes back what was certain."""
    pieces = tokenizer.detokenizer(include_special_tokens=special)
    whole = "".join([*map(pieces.push, token_ids), pieces.flush()])
    return whole != tokenizer.decode(token_ids, include_special_tokens=special)


@pytest.mark.parametrize("name", NAMES)
async def test_prompt_and_answer_are_the_text_of_all_tokens_wherever_the_answer_begins(name: str) -> None:
    tokenizer = opened(name)
    num_invalid = 0
    for number, token_ids in enumerate(await drawn(tokenizer, name)):
        special = bool(number % 2)
        if is_invalid(tokenizer, token_ids, special=special):
            num_invalid += 1
            continue
        whole = tokenizer.decode(token_ids, include_special_tokens=special)
        for cut in range(len(token_ids) + 1):
            prompt, answer = token_ids[:cut], token_ids[cut:]
            shown = await tokenizer.prompt_text(prompt, include_special_tokens=special)
            pieces = tokenizer.detokenizer(include_special_tokens=special, prompt=prompt)
            assert shown + "".join([*map(pieces.push, answer), pieces.flush()]) == whole, (prompt, answer)
    assert num_invalid < SEQUENCES // 3


@pytest.mark.parametrize("name", SENTENCEPIECE)
async def test_the_space_before_the_first_token_of_an_answer_is_kept(name: str) -> None:
    """The decoders of SentencePiece's vocabularies drop the first space of what they decode. As in vLLM,
    that is the space before the prompt, also in a chat."""
    tokenizer = opened(name)
    the = tokenizer.id_of("▁the")
    assert the is not None
    for text in ("Hello", "<s>[INST] Hello [/INST]", "a\n", "😀"):
        prompt = await tokenizer.encode(text, add_special_tokens=True)
        pieces = tokenizer.detokenizer(include_special_tokens=False, prompt=prompt)
        assert pieces.push(the) + pieces.flush() == " the"
    for prompt in ([], [1]):
        pieces = tokenizer.detokenizer(include_special_tokens=False, prompt=prompt)
        assert pieces.push(the) + pieces.flush() == "the"
