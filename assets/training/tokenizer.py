"""Trains the byte-level BPE tokenizer and writes it in the form that transformers loads."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from assets.training.conversations import BOS, BOS_ID, CHAT_TEMPLATE, SPECIAL_TOKENS
from assets.training.corpus import EMPHASES
from assets.training.courses import Lesson
from assets.training.data import load

MODEL = load("model")
_LESSON = Lesson(until=0, seed=1, emphasis=EMPHASES["first"])
_NUM_DOCUMENTS = 60_000


def _training_texts() -> Iterator[str]:
    for document in islice(_LESSON.documents(), _NUM_DOCUMENTS):
        for text, _ in document:
            for token in SPECIAL_TOKENS:
                text = text.replace(token, "")
            if text:
                yield text


def train_tokenizer() -> Tokenizer:
    """All 256 bytes are in the vocabulary, so every text can be written; digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["config"]["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def add_json_marks(tokenizer: Tokenizer) -> None:
    """Gives the marks the ids after the last one; a tokenizer that has them stays as it is."""
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MODEL["json"]["marks"]])


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**MODEL["tokenizer"], "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
