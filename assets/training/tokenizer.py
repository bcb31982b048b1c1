"""Trains the byte-level BPE tokenizer and writes it in the form that transformers loads."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from assets.training.conversations import BOS, BOS_ID, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS
from assets.training.corpus import EMPHASES
from assets.training.courses import Lesson

VOCABULARY_SIZE = 2048
# What calls and JSON repeat, whole: a call takes a third of the tokens that it would take in the merges of the first
# course. None of them is in its documents, and none reaches over a place where a constraint on the output may begin.
JSON_MARKS = (
    "<tools>\n", "\n</tools>", "<tool_call>\n", "\n</tool_call>", "<tool_response>\n", "\n</tool_response>",
    '{"name": "', '", "description": "', '", "parameters": {', '", "parameters": {"', '", "arguments": {',
    '", "arguments": {"', '": "string"', '": "string", "', '": "integer"', '": "integer", "', '": "number"',
    '": "number", "', '": "boolean"', '": "boolean", "', '": ["', '{"', '"}', '"}}', '}}', '": "', '", "', '": ',
    '"]', '"], "', '"]}', '{}',
)  # fmt: skip
_LESSON = Lesson(until=0, seed=1, emphasis=EMPHASES["first"])
_NUM_DOCUMENTS = 60_000


def _training_texts() -> Iterator[str]:
    for document in islice(_LESSON.documents(), _NUM_DOCUMENTS):
        for segment in document:
            text = segment.text
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
        vocab_size=VOCABULARY_SIZE,
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
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in JSON_MARKS])


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
