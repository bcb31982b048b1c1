"""The table of model families in the documentation."""

from tests.real.families import DOCUMENT, NOT_TRIED, REFUSED, TYPES, documented


def test_the_document_lists_the_families_that_tests_compare() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == documented(text), "write it: python -m tests.real.families"
    others = [*NOT_TRIED, *(model_type for types in REFUSED.values() for model_type in types)]
    assert len(set(others)) == len(others)
    assert set(others) <= TYPES.keys()
