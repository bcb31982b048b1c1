"""Vocabularies of every kind of tokenizer, and texts as a model with random weights writes them under a constraint."""

import json
import re
import string
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.matcher import MaskMaker, Matcher, Template, Vocabulary
from tests.support.tokenizers import byte_fallback, byte_level, id_of

EOS = "</s>"


@cache
def sentence_pieces() -> tokenizers.Tokenizer:
    """A tokenizer as SentencePiece makes it: pieces with scores, words begin with "▁", and no byte tokens."""
    characters = string.ascii_letters + string.digits + string.punctuation + "éößü名前\n\t"
    pieces = ["▁", *characters, "▁the", "▁cat", "at", "he", '":', '",', '▁"', '{"', "00", "true", "null", "▁20"]
    scored = [("<unk>", 0.0), (EOS, 0.0), *((piece, -float(len(pieces) - n)) for n, piece in enumerate(pieces))]
    tokenizer = tokenizers.Tokenizer(models.Unigram(scored, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([EOS, "<unk>"])
    return tokenizer


TOKENIZERS = {"byte level": byte_level, "byte fallback": byte_fallback, "sentence pieces": sentence_pieces}


@cache
def vocabulary(kind: str) -> Vocabulary:
    """The vocabulary of one of TOKENIZERS."""
    return make_vocabulary(TOKENIZERS[kind]())


def make_vocabulary(tokenizer: tokenizers.Tokenizer, size: int | None = None) -> Vocabulary:
    return Vocabulary.of_tokenizer(json.loads(tokenizer.to_str()), size, [id_of(tokenizer, EOS)])


def make_template(constraint: Constraint, kind: str = "byte level") -> Template:
    return Template.of(constraint, vocabulary(kind))


def make_matcher(constraint: Constraint, kind: str = "byte level") -> Matcher:
    return make_template(constraint, kind).matcher(tuple(vocabulary(kind).eos))


def mask_of(matcher: Matcher, held: Vocabulary, *, delays_end: bool = False) -> np.ndarray:
    """[tokens of the vocabulary] bool, the tokens that may follow."""
    (mask,) = MaskMaker(held, 1).make([matcher], [delays_end])
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[: held.tokenizer.vocab_size].view(np.bool_)


def allowed_texts(matcher: Matcher, kind: str = "byte level") -> set[bytes]:
    """The texts of the tokens that may follow, also of eos."""
    held = vocabulary(kind)
    return {held.token_bytes[token_id] for token_id in np.flatnonzero(mask_of(matcher, held))}


def _tokens(held: Vocabulary, text: str) -> list[int]:
    # llguidance 1.9 drops all bytes after the first 1,024.
    pieces = re.findall(r".{1,250}", text, re.DOTALL)
    return [token_id for piece in pieces for token_id in held.tokenizer.tokenize_str(piece)]


def spelled(text: str, held: Vocabulary | None = None) -> list[int]:
    """Tokens of a text; special tokens if the text names them."""
    held = held or vocabulary("byte level")
    if not held.special_tokens:
        return _tokens(held, text)
    parts = re.split(f"({'|'.join(map(re.escape, held.special_tokens))})", text)
    made = ([held.special_tokens[part]] if at % 2 else _tokens(held, part) for at, part in enumerate(parts))
    return [token_id for token_ids in made for token_id in token_ids]


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a text is complete under a constraint, with any tokens."""
    return accepts_text(make_template(constraint), text)


def accepts_text(template: Template, text: str) -> bool:
    """Same as `accepts`, for a constraint that is compiled only once."""
    # Byte by byte, so that no forced spelling of a text matters.
    return accepts_tokens(template, [template.vocabulary.token_bytes.index(bytes([byte])) for byte in text.encode()])


def accepts_tokens(template: Template, token_ids: Sequence[int]) -> bool:
    """Whether the text of these tokens is complete under a constraint."""
    matcher = template.matcher(tuple(template.vocabulary.eos))
    for token_id in token_ids:
        matcher.consume(token_id)
        if matcher.error is not None:
            return False
    return matcher.may_end


def write(
    template: Template,
    choose: Callable[[np.ndarray], int],
    *,
    max_tokens: int,
    on_step: Callable[[Sequence[int], np.ndarray], None] = lambda *_: None,
) -> tuple[list[int], bool]:
    """Tokens that `choose` picks of the allowed ones, and whether the text ended by itself."""
    held = template.vocabulary
    matcher, written = template.matcher(tuple(held.eos)), list[int]()
    maker = MaskMaker(held, 1)
    while len(written) < max_tokens:
        (mask,) = maker.make([matcher], [False])
        assert matcher.error is None, (matcher.error, held.tokenizer.decode_str(written))
        on_step(written, mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        token_id = choose(np.flatnonzero(bits))
        matcher.consume(token_id)
        if token_id in held.eos:
            return written, True
        written.append(token_id)
    return written, False
