"""The courses equal the ones that made the embedded weights; each takes steps and saves the results."""

import hashlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shutil import copyfile

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assets.training.train import COURSES, Course, take

DIRECTORY = Path(__file__).parents[3] / "assets" / "quire-tiny"
TWINS = [course.twin for course in COURSES if course.twin]
LESSONS = [lesson for course in (*COURSES, *TWINS) for lesson in course.lessons]
# Digests of the first 100 documents of each lesson, by the generators that made the weights.
DIGESTS = [
    "4e31ec359e0d63e3", "eaef12770e79dc99", "5be369b8befa5b1c", "c69f7998e4ea2cea", "259aa2cba6661407",
    "d2162ef845b7123b", "76bbbeb3924cb622", "e7e014aecb7fdd3a", "1e4d251c28720058", "de78a41155d9a5ff",
    "943ce9dfd34757cb",
]  # fmt: skip


@pytest.mark.parametrize(("lesson", "digest"), list(zip(LESSONS, DIGESTS, strict=True)))
def test_a_lesson_has_the_documents_that_the_weights_were_trained_on(lesson, digest):
    documents = [list(document) for document in islice(lesson.documents(), 100)]
    assert hashlib.sha256(repr(documents).encode()).hexdigest()[:16] == digest


def shortened(course: Course) -> Course:
    return replace(
        course, lessons=(replace(course.lessons[0], until=3),), twin=shortened(course.twin) if course.twin else None
    )


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.long) for number in range(1, len(COURSES)))]
)
def test_a_course_goes_on_from_a_model_and_writes_another(number, tmp_path):
    start, output = tmp_path / "start", tmp_path / "output"
    config = LlamaConfig.from_pretrained(
        DIRECTORY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    before = LlamaForCausalLM(config)
    before.save_pretrained(start)
    copyfile(DIRECTORY / "tokenizer.json", start / "tokenizer.json")
    take(shortened(COURSES[number]), start, output)
    after = LlamaForCausalLM.from_pretrained(output)
    assert not torch.equal(after.model.embed_tokens.weight, before.model.embed_tokens.weight.bfloat16())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "heldout.txt"):
        assert (output / name).read_bytes() == (DIRECTORY / name).read_bytes()
