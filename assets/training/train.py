"""Makes assets/quire-tiny: python -m assets.training.train.

A course is a mixture of documents, a number of steps and learning rates, as `data/courses.toml` has them. The first one
starts from random weights and a new tokenizer, each of the others from the file of the one before.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from assets.training.conversations import BOS, BOS_ID, CHAT_TEMPLATE, SPECIAL_TOKENS, TOKEN_IDS, Document, document
from assets.training.corpus import draw, held_out_texts, load, make_document, plain_question_document
from assets.training.json_questions import JSON_KINDS, json_conversation, led_document
from assets.training.tool_lessons import draw_parallel_calls, make_reworded_conversation, make_tool_conversation
from assets.training.visitors import make_visitor_document

# How much the choice of a tool counts where tools are reworded.
_DECISION_WEIGHT = 3.0
# The lengths of rows in the batches of consecutive steps. A conversation with tools has some 240 tokens and would
# seldom end within a row of 256.
_LENGTHS, _LONG_LENGTHS = (256, 256, 512, 256, 256, 1024, 256, 256, 512, 256), (512, 512, 512, 512, 1024)


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` int64 [rows, length]; `weights` float32 of the same shape, how much predicting that token counts."""

    tokens: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Lesson:
    """A part of training up to step `until`, on the stream of documents that `data/courses.toml` describes."""

    until: int
    seed: int
    emphasis: str = "fourth"
    old: float = 1.0
    tools: float = 0.0
    reworded: float = 0.0
    visitors: float = 0.0
    asked: str = "first"

    def batches(self, tokenizer: Tokenizer, start: int) -> Iterator[Batch]:
        """The batches from step `start` on. A row starts with a document; the last document is cut to fit."""
        encoded = (
            [(id, weight) for text, weight in each for id in tokenizer.encode(text, add_special_tokens=False).ids]
            for each in self.documents()
        )
        size, lengths = (4096, _LENGTHS) if self.old == 1.0 else (2048, _LONG_LENGTHS)
        for step in range(start, self.until):
            length = lengths[step % len(lengths)]
            rows: list[list[tuple[int, float]]] = []
            for _ in range(size // length):
                row: list[tuple[int, float]] = []
                while len(row) < length:
                    row += next(encoded)
                rows.append(row[:length])
            yield Batch(*(torch.tensor([[pair[i] for pair in row] for row in rows]) for i in range(2)))

    def documents(self) -> Iterator[Document]:
        """An endless stream, the same for the same lesson. Pieces of a document meet where the tokenizer splits."""
        rng = Random(self.seed)
        while True:
            yield self._document(rng)

    def _document(self, rng: Random) -> Document:
        if self.visitors and rng.random() < self.visitors:
            return make_visitor_document(rng, self.asked)
        if self.reworded and (choice := rng.random()) < self.reworded:
            is_one = choice < self.reworded * 0.9
            made = make_reworded_conversation(rng) if is_one else draw_parallel_calls(rng, held_out=False)
            return document(made, decision_weight=_DECISION_WEIGHT)
        if self.old == 1.0 or (choice := rng.random()) < self.old:
            return make_document(rng, self.emphasis)
        if choice < self.old + self.tools:
            return document(make_tool_conversation(rng))
        if choice < 0.96:
            return document(json_conversation(rng, self.emphasis))
        if choice < 0.99:
            return led_document(rng)
        return plain_question_document(draw(rng.choice(list(JSON_KINDS.values())), rng, held_out=False))


@dataclass(frozen=True, slots=True)
class Course:
    """A course of training; `data/courses.toml` explains the fields."""

    rates: list[tuple[int, float]]
    lessons: tuple[Lesson, ...]
    way_back: float = 0.0
    twin: "Course | None" = None

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Course":
        lessons = tuple(Lesson(**lesson) for lesson in data["lessons"])
        return cls(data["rate"], lessons, data.get("way_back", 0.0), cls.of(data["twin"]) if "twin" in data else None)

    def batches(self, tokenizer: Tokenizer) -> Iterator[Batch]:
        start = 0
        for lesson in self.lessons:
            yield from lesson.batches(tokenizer, start)
            start = lesson.until


COURSES = tuple(Course.of(data) for data in load("courses")["courses"])
_MODEL = load("model")
_HELD_OUT_SEED, _HELD_OUT_TEXTS = 99, 390
_TOKENIZER_DOCUMENTS = 60_000

Loss = Callable[[LlamaForCausalLM, Batch], torch.Tensor]


def train_tokenizer() -> Tokenizer:
    """All 256 bytes are in the vocabulary, so every text can be written; each digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r"[0-9]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_MODEL["config"]["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = islice(Lesson(until=0, seed=1, emphasis="first").documents(), _TOKENIZER_DOCUMENTS)
    texts = (re.sub("|".join(map(re.escape, SPECIAL_TOKENS)), "", text) for each in documents for text, _ in each)
    tokenizer.train_from_iterator(filter(None, texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def _begin(start: Path | None) -> tuple[LlamaForCausalLM, Tokenizer]:
    """The model and tokenizer that a course begins with: the stored weights, in float32, so that the time of the course
    before does not matter; or random weights and a new tokenizer.

    The marks of JSON get the ids after the last one, and each mark the mean of the embeddings of its pieces. A
    tokenizer that has them stays as it is.
    """
    if start is None:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**_MODEL["config"], **TOKEN_IDS)), train_tokenizer()
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    before, tokenizer = (Tokenizer.from_file(str(start / "tokenizer.json")) for _ in range(2))
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in _MODEL["json"]["marks"]])
    embeddings = model.resize_token_embeddings(tokenizer.get_vocab_size(), mean_resizing=False)
    with torch.no_grad():
        for token in range(before.get_vocab_size(), tokenizer.get_vocab_size()):
            pieces = before.encode(str(tokenizer.id_to_token(token)), add_special_tokens=False).ids
            embeddings.weight[token] = embeddings.weight[pieces].mean(0)
    return model, tokenizer


def _weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Cross entropy of each token given those before it, its mean by the batch's weights."""
    weights = batch.weights[:, 1:]
    counts = weights > 0
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.tokens, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[counts])
    losses = cross_entropy(logits.float(), batch.tokens[:, 1:][counts], reduction="none")
    return (losses * weights[counts]).sum() / weights.sum()


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, course: Course, loss_of: Loss = _weighted_loss) -> None:
    model.train()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == ndim], "weight_decay": decay}
        for ndim, decay in ((2, 0.05), (1, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)
    started, seen = time.monotonic(), 0
    for step, batch in enumerate(course.batches(tokenizer)):
        steps, rates = zip(*course.rates, strict=True)
        rate = float(np.interp(step, steps, rates))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen += batch.tokens.numel()
        if step % 20 == 0:
            pace = seen / (time.monotonic() - started)
            print(f"step {step} loss {loss.item():.4f} rate {rate:.2e} tokens/s {pace:.0f}", flush=True)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the files of a model directory, each whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch)
        copy = deepcopy(model).bfloat16()
        copy.generation_config = GenerationConfig(**_MODEL["generation"], **TOKEN_IDS)
        copy.save_pretrained(made)
        tokenizer.save(str(made / "tokenizer.json"))
        config = {**_MODEL["tokenizer"], "chat_template": CHAT_TEMPLATE}
        (made / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (made / "heldout.txt").write_text("\n\n".join(held_out_texts(_HELD_OUT_SEED, _HELD_OUT_TEXTS)) + "\n")
        for path in sorted(made.iterdir()):
            path.chmod(0o644)  # safetensors writes files that only the owner can read
            path.replace(directory / path.name)


@torch.no_grad()
def _move(model: LlamaForCausalLM, other: LlamaForCausalLM, share: float) -> None:
    """Moves the weights on the straight line to the weights of `other`, by `share` of the distance."""
    for weight, target in zip(model.parameters(), other.parameters(), strict=True):
        weight.lerp_(target, share)


def take(course: Course, start: Path | None, output: Path) -> None:
    """Trains from the model in `start`, or from nothing, and writes what came of it to `output`."""
    model, tokenizer = _begin(start)
    train(model, tokenizer, course)
    if course.twin:
        other, _ = _begin(start)
        train(other, tokenizer, course.twin)
        _move(model, other, 0.5)
    if course.way_back:
        _move(model, _begin(start)[0], course.way_back)
    export(model, tokenizer, output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("assets/quire-tiny"))
    about = "the first one to take; any but the first goes on from what --output holds"
    parser.add_argument("--course", type=int, choices=range(1, len(COURSES) + 1), default=1, help=about)
    arguments = parser.parse_args()
    torch.set_flush_denormal(True)
    for number, course in enumerate(COURSES[arguments.course - 1 :], arguments.course):
        take(course, arguments.output if number > 1 else None, arguments.output)
        print(f"wrote {arguments.output} after course {number}")


if __name__ == "__main__":
    main()
