"""The table of model families in the documentation."""

import gguf

from quire.model_files.gguf_encoders import ENCODER_CONFIGS
from quire.model_files.gguf_families import CONFIGS
from tests.real import gguf_names
from tests.real.families import DOCUMENT, NOT_TRIED, REFUSED, TYPES, documented


def test_the_document_lists_the_families_that_tests_compare() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == documented(text), "write it: python -m tests.real.families"
    others = [*NOT_TRIED, *(model_type for types in REFUSED.values() for model_type in types)]
    assert len(set(others)) == len(others)
    assert set(others) <= TYPES.keys()


def test_the_document_has_each_architecture_of_gguf_files() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == gguf_names.documented(text), "write it: python -m tests.real.gguf_names"
    refused = [name for names in gguf_names.REFUSED.values() for name in names]
    assert len(set(refused)) == len(refused)
    read = CONFIGS.keys() | ENCODER_CONFIGS.keys()
    assert not read & set(refused)
    assert set(gguf.MODEL_ARCH_NAMES.values()) <= read | set(refused)
