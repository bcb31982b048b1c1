"""Tokens of real vocabularies in GGUF files, which llama.cpp's tests have with the tokens that it expects."""

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers

from quire.model_files.gguf_header import GgufFields, GgufHeader
from quire.model_files.gguf_tokenizer import tokenizer_of
from tests.real.packages import pypi

pytestmark = pytest.mark.real
NAMES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_tokens_that_llama_cpp_expects(name: str) -> None:
    file = pypi("llama-cpp-python", "0.3.36", sdist=True) / f"vendor/llama.cpp/models/ggml-vocab-{name}.gguf"
    fields = GgufFields(GgufHeader.read(file))
    content = tokenizer_of(fields, fields.texts("tokenizer.ggml.tokens"))
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = Path(f"{file}.out").read_text(encoding="utf-8").split("\n")
    assert len(texts) > 45
    is_normalized = content["normalizer"] == {"type": "NFC"}
    for text, ids in zip(texts, expected, strict=False):
        if is_normalized and not unicodedata.is_normalized("NFC", text):
            continue  # llama.cpp leaves such texts as they are, and transformers does not.
        assert tokenizer.encode(text, add_special_tokens=False).ids == [int(each) for each in ids.split()], text
