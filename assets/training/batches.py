"""Packs documents into rows of equal length, with a weight for the loss of each token."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Tokenizer

from assets.training.conversations import PAD_ID, Document
from assets.training.courses import Lesson

_DOCUMENTS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` int64 [rows, length]; `weights` float32 of the same shape, how much predicting that token counts."""

    tokens: torch.Tensor
    weights: torch.Tensor


# Of each token its id and its weight.
EncodedDocument = list[tuple[int, float]]


def encoded_documents(tokenizer: Tokenizer, stream: Iterator[Document]) -> Iterator[EncodedDocument]:
    """Encodes segment by segment; segments meet where the tokenizer splits anyway."""
    while True:
        chunk = list(islice(stream, _DOCUMENTS_AT_ONCE))
        texts = [text for document in chunk for text, _ in document]
        encodings = iter(tokenizer.encode_batch(texts, add_special_tokens=False))
        for document in chunk:
            yield [(token, weight) for _, weight in document for token in next(encodings).ids]


def _fill_row(stream: Iterator[EncodedDocument], length: int) -> EncodedDocument:
    """A row starts with a document; the one that does not fit at the end is cut."""
    row: EncodedDocument = []
    while len(row) < length:
        row += next(stream)
    return row[:length]


def next_batch(stream: Iterator[EncodedDocument], shape: tuple[int, int]) -> Batch:
    """Of a number of rows, and of tokens in each."""
    rows = [_fill_row(stream, shape[1]) for _ in range(shape[0])]
    tokens = torch.tensor([[token for token, _ in row] for row in rows])
    weights = torch.tensor([[weight for _, weight in row] for row in rows])
    return Batch(tokens, weights.masked_fill(tokens == PAD_ID, 0.0))


def lesson_batches(tokenizer: Tokenizer, lessons: tuple[Lesson, ...], done: int) -> Iterator[tuple[int, Batch]]:
    """The batches from step `done` on, the same whether or not training was interrupted there."""
    start = 0
    for lesson in lessons:
        if done < lesson.until:
            stream = encoded_documents(tokenizer, lesson.documents())
            for step in range(start, lesson.until):
                batch = next_batch(stream, lesson.shapes[step % len(lesson.shapes)])
                if step >= done:
                    yield step, batch
        start = lesson.until
