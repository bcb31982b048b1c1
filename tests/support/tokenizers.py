"""Small tokenizers of the two kinds that supported models use."""

import functools
import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from gateway.offload import FairExecutor
from gateway.text.tokenizer import Tokenizer

BOS, EOS = "<s>", "</s>"
_TEXTS = ["the cat sat on the mat", "hello world, hello there", "naïve café 😀 and 👍🏽 again 😀😀", "你好世界"]


@functools.cache
def byte_level() -> tokenizers.Tokenizer:
    """A tokenizer like GPT-2's: every byte has a token, a character outside ASCII may be split into several."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS * 3, trainer)
    _prepend_bos(tokenizer)
    return tokenizer


def byte_level_bytes() -> dict[int, int]:
    """The token id of each single byte in `byte_level`, whose vocabulary writes unprintable bytes as 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    vocabulary = byte_level().get_vocab()
    return {byte: vocabulary[character] for byte, character in spelled.items()}


@functools.cache
def byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer like LLaMA's: words begin with "▁", its first space is dropped, unknown characters become bytes."""
    vocabulary = {"<unk>": 0, BOS: 1, EOS: 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "▁")]
    for token in [*string.ascii_letters, *",.!?'", "▁", "é", *("".join(pair) for pair in merges)]:
        vocabulary.setdefault(token, len(vocabulary))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([BOS, EOS])
    _prepend_bos(tokenizer)
    return tokenizer


def wrapped(tokenizer: tokenizers.Tokenizer, executor: FairExecutor | None = None) -> Tokenizer:
    """The gateway's tokenizer with a copy of this one."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    return Tokenizer(copy, executor or FairExecutor(1))


def write_model_directory(directory: Path, tokenizer: tokenizers.Tokenizer, **files: str) -> Path:
    """A model directory without weights; `files` are further files' texts by name, with "__" for the dot."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "eos_token_id": 1}')
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def _prepend_bos(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )


def id_of(tokenizer: tokenizers.Tokenizer, token: str) -> int:
    """The id of a token of the vocabulary."""
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id
