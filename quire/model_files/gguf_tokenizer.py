"""The tokenizer of a GGUF file, as the content of tokenizer.json."""

import base64
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.model_files.gguf_header import GgufFields

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"
# A file has one token that ends a text; generation_config.json may have several. Tokens that end a turn are recognised
# by their texts, as in llama.cpp, and are special even if their type differs.
_ENDS_OF_TURNS = frozenset(
    (
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "[e~[",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<EOT>",
        "[EOT]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
# In vocabularies with one of these pairs, as of GPT-OSS and Solar Open, the first text ends only a part of a turn.
_END_OF_PART = "<|end|>"
_ENDS_OF_PARTS = (frozenset(("<|return|>", "<|call|>")), frozenset(("<|calls|>", "<|flush|>")))

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}|{_REST}"
_QWEN_35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LING = _QWEN_2.replace(r"\s*[\r\n]+", r"\s*[\r\n]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_CHINESE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DIGIT = r"\p{N}"
_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE, _DIGIT)
# Letters of two cases in scripts that DeepSeek's list of ranges has.
_CASED = (
    "[\\p{Lu}\\p{Ll}\\p{Lt}&&[^\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua790-\ua7ff\uab30-\uab6f"
    "\U00010570-\U000105bf\U00010d50-\U00010d8f\U00016e40-\U00016eff\U0001d400-\U0001dfff]]"
)
_MARKS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
_DEEPSEEK = (r"[\r\n]", rf"\s?{_CASED}+", rf"\s?{_MARKS}+", r"\s+$", _CHINESE, _DIGIT)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_KOREAN_AND_CHINESE = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_YOUTU = (_KOREAN_AND_CHINESE, _GPT_4O.replace(r"\p{N}{1,3}", r"\p{N}"))
# Whitespace in runs of powers of two.
_RUNS = "|".join(rf"\s{{{1 << exponent}}}(?!\S)" for exponent in range(9, 1, -1))
_JAIS_2 = _LLAMA_3.removesuffix(r"\s+(?!\S)|\s+") + rf"{_RUNS}|\s{{1,2}}(?!\S)|\s{{1}}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_NO_HAN = r"&&[^\p{Han}]]"
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}{_UPPER[:-1]}{_NO_HAN}*{_LOWER[:-1]}{_NO_HAN}+{_CONTRACTIONS}?"
    rf"|{_BEFORE}{_UPPER[:-1]}{_NO_HAN}+{_LOWER[:-1]}{_NO_HAN}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}|{_REST}"
)
_WORDS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True, slots=True)
class _Split:
    """How byte-level BPE splits a text before it merges.

    Attributes:
        patterns: The texts that each step cuts out; the text between them is a piece, too.
        then_as_gpt_2: Whether a last step splits as GPT-2 does.
        whole: Whether a piece that is a token stays one, in spite of the merges.
        with_bos: Whether the first token comes before a text, unless the file says otherwise.
        normalized: Whether the text is brought to the normal form NFC first, as transformers does and llama.cpp does
            not.
    """

    patterns: tuple[str, ...] = ()
    then_as_gpt_2: bool = False
    whole: bool = False
    with_bos: bool = False
    normalized: bool = False


_AS_GPT_2 = _Split((), then_as_gpt_2=True)
_DIGITS = _Split((_DIGIT,), then_as_gpt_2=True)
_AS_LLAMA_3 = _Split((_LLAMA_3,), whole=True, with_bos=True)
_AS_QWEN_2 = _Split((_QWEN_2,), normalized=True)
_SPLITS = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "mellum", "a.x-4.0"), _AS_GPT_2),
    **dict.fromkeys(("granite-docling", "gigachat"), _AS_GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _AS_LLAMA_3),
    "lfm2": _AS_LLAMA_3,
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _Split((_LLAMA_3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2"), _AS_QWEN_2),
    "qwen35": _Split((_QWEN_35,), normalized=True),
    **dict.fromkeys(("bailingmoe", "bailingmoe2"), _Split((_LING,))),
    "tiny_aya": _Split((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O)),
    "modern-bert": _Split((), then_as_gpt_2=True, normalized=True),
    **dict.fromkeys(("megrez", "kormo", "stablelm2", "hunyuan", "solar-open"), _Split((_QWEN_2,))),
    **dict.fromkeys(("viking", "poro-chat"), _Split((_WORDS, _DIGIT))),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _Split((_GPT_4O,))),
    "tekken": _Split((_TEKKEN,), whole=True, with_bos=True),
    "seed-coder": _Split((_SEED,)),
    "deepseek-coder": _Split(_CODER),
    "deepseek-llm": _Split(_DEEPSEEK),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"), _Split(_DEEPSEEK_3)),
    **dict.fromkeys(("glm4", "glm5"), _Split((_LLAMA_3,), whole=True)),
    "youtu": _Split(_YOUTU, whole=True),
    "exaone-moe": _Split((_EXAONE_MOE,)),
    "jais-2": _Split((_JAIS_2,)),
    "kimi-k2": _Split((_KIMI,), whole=True),
    "minicpm5": _Split((r"\p{N}{1,3}", _LLAMA_3), whole=True),
}
"""By tokenizer.ggml.pre, the name of the tokenizer that llama.cpp knew first to split so."""
SPLIT_NAMES = tuple(reversed({split: name for name, split in reversed(_SPLITS.items())}.values()))
"""One name for each way to split, the first that has it."""
_UNNAMED = "default"
_MAX_TOKEN_CHARS = 4096
# Ten times Gemma's. A few tokens can have many merges: 4,096 tokens of one repeated character have 8 million.
_MAX_MERGED_CHARS = 1 << 26


def ends_of_turns(tokens: Collection[str]) -> frozenset[str]:
    """The tokens that end a turn in this vocabulary, if it has them."""
    has_parts = any(pair <= frozenset(tokens) for pair in _ENDS_OF_PARTS)
    return _ENDS_OF_TURNS - {_END_OF_PART} if has_parts else _ENDS_OF_TURNS


def tokenizer_of(fields: GgufFields, tokens: Sequence[str]) -> dict[str, Any]:
    kind = fields.text("tokenizer.ggml.model")
    kinds = fields.header.metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type does not have an entry for each token")
    ends = ends_of_turns(tokens)
    kinds = [_CONTROL if token in ends else kind for token, kind in zip(tokens, kinds, strict=True)]
    if longest := next((token for token in tokens if len(token) > _MAX_TOKEN_CHARS), None):
        raise fields.error(f"the token {longest!r:.40}... has {len(longest)} characters, more than {_MAX_TOKEN_CHARS}")
    if kind == "gpt2":
        split = _split_of(fields)
        parts = _byte_level(fields, tokens, split)
        with_bos = split.with_bos
    elif kind in ("llama", "gemma4"):
        # Gemma 4's have merges in addition to scores, which say nothing.
        scored = None if kind == "gemma4" else _scores(fields, tokens, kinds)
        merges = _merges(fields, tokens) if scored is None else _merges_of(fields, tokens, scored, kinds)
        parts = _sentence_piece(fields, tokens, merges)
        with_bos = True
    elif kind in ("bert", "t5"):
        return (_word_piece if kind == "bert" else _unigram)(fields, tokens, kinds)
    else:
        raise fields.error(
            f"tokenizer.ggml.model is {kind}; Quire reads gpt2 (byte-level BPE), llama (SentencePiece), gemma4, "
            "bert (WordPiece) and t5 (Unigram)"
        )
    bos, eos = fields.token_id("bos"), fields.token_id("eos")
    # Some files of Gemma 4 deny it, against the model.
    before = bos if kind == "gemma4" or fields.flag("tokenizer.ggml.add_bos_token", with_bos) else None
    after = eos if fields.flag("tokenizer.ggml.add_eos_token", False) else None
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, kinds),
        **parts,
        "post_processor": _post_processor(tokens, before, after),
    }


def _word_piece(fields: GgufFields, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """BERT's. In the file, a piece that begins a word begins with a mark, and others do not."""

    def piece(token: str) -> str:
        if token.startswith(_SPACE):
            return token[1:]
        return token if token.startswith("[") and token.endswith("]") else f"##{token}"

    def named(*names: str, text: str) -> int:
        ids = (fields.token_id(name) for name in names)
        found = next((each for each in ids if each is not None), None)
        if found is None and text not in tokens:
            raise fields.error(f"its vocabulary has no {text}, and it names no other token for that")
        return tokens.index(text) if found is None else found

    pieces = [piece(token) for token in tokens]
    first, last = named("cls", "bos", text="[CLS]"), named("seperator", "eos", text="[SEP]")
    unknown = named("unknown", text="[UNK]")
    special = {first, last, unknown, *filter(None, map(fields.token_id, ("padding", "mask")))}
    kinds = [_CONTROL if index in special else kind for index, kind in enumerate(kinds)]
    normal = [
        piece for piece, kind in zip(pieces, kinds, strict=True) if kind != _CONTROL and not piece.startswith("[")
    ]
    is_cased = any(piece != piece.lower() for piece in normal)
    return {
        **_around(pieces, first, last, separators=1),
        "added_tokens": _added_tokens(pieces, [kind if kind == _CONTROL else _NORMAL for kind in kinds]),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not is_cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": pieces[unknown],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {piece: index for index, piece in enumerate(pieces)},
        },
    }


def _unigram(fields: GgufFields, tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, Any]:
    """XLM-RoBERTa's."""
    first, last, unknown = (fields.token_id(name) for name in ("bos", "eos", "unknown"))
    if first is None or last is None or unknown is None:
        raise fields.error(
            "it does not name the first, the last and the unknown token (tokenizer.ggml.bos_token_id, ...)"
        )
    charsmap = fields.header.metadata.get("tokenizer.ggml.precompiled_charsmap") or []
    if not isinstance(charsmap, list) or not all(type(each) is int for each in charsmap):
        raise fields.error("tokenizer.ggml.precompiled_charsmap is no list of bytes")
    encoded = base64.b64encode(bytes(each & 0xFF for each in charsmap)).decode()
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": True}
    scores = _scores(fields, tokens, kinds)
    return {
        **_around(tokens, first, last, separators=2),
        "added_tokens": _added_tokens(tokens, kinds),
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded} if encoded else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]},
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "byte_fallback": False,
            "vocab": [[token, score] for token, score in zip(tokens, scores, strict=True)],
        },
    }


def _around(tokens: Sequence[str], first: int, last: int, *, separators: int) -> dict[str, Any]:
    """The special tokens of one text and of a pair, which has `separators` last tokens between its texts."""

    def special(token_id: int, type_id: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": tokens[token_id], "type_id": type_id}}

    one = [special(first), {"Sequence": {"id": "A", "type_id": 0}}, special(last)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, special(last, 1)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": one,
            "pair": [*one, *[special(last)] * (separators - 1), *second],
            "special_tokens": {
                tokens[each]: {"id": tokens[each], "ids": [each], "tokens": [tokens[each]]} for each in (first, last)
            },
        },
    }


def _added_tokens(tokens: Sequence[str], kinds: Sequence[int]) -> list[dict[str, Any]]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": token_id, "content": token, **plain, "special": kind != _USER_DEFINED}
        for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(tokens: Sequence[str], before: int | None, after: int | None) -> dict[str, Any] | None:
    if before is None and after is None:
        return None
    around = {tokens[token_id]: token_id for token_id in (before, after) if token_id is not None}

    def template(*sequences: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for type_id, name in enumerate(sequences):
            inner = [{"Sequence": {"id": name, "type_id": type_id}}]
            for token_id, place in ((before, 0), (after, 2)):
                if token_id is not None:
                    inner.insert(place, {"SpecialToken": {"id": tokens[token_id], "type_id": type_id}})
            parts += inner
        return parts

    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": {
            token: {"id": token, "ids": [token_id], "tokens": [token]} for token, token_id in around.items()
        },
    }


def _split_of(fields: GgufFields) -> _Split:
    pre = fields.text("tokenizer.ggml.pre", _UNNAMED)
    if pre == _UNNAMED:
        raise fields.error(
            "it does not say how its tokenizer splits a text (tokenizer.ggml.pre), as files that llama.cpp wrote "
            "before May 2024; convert the model again"
        )
    if pre not in _SPLITS:
        raise fields.error(f"tokenizer.ggml.pre is {pre!r:.80}; Quire reads {', '.join(_SPLITS)}")
    return _SPLITS[pre]


def _byte_level(fields: GgufFields, tokens: Sequence[str], split: _Split) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": split.then_as_gpt_2,
    }
    steps = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in split.patterns
    ]
    return {
        "normalizer": {"type": "NFC"} if split.normalized else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "decoder": byte_level,
        "model": _bpe(tokens, _merges(fields, tokens), ignore_merges=split.whole),
    }


def _merges(fields: GgufFields, tokens: Sequence[str]) -> list[tuple[str, str]]:
    known, found = frozenset(tokens), []
    for merge in fields.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if left not in known or right not in known or left + right not in known:
            raise fields.error(f"the merge {merge!r:.80} is not of two tokens to a third one")
        found.append((left, right))
    return found


def _sentence_piece(fields: GgufFields, tokens: Sequence[str], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    with_prefix = fields.text("tokenizer.ggml.model") == "llama" and fields.flag(
        "tokenizer.ggml.add_space_prefix", True
    )
    unknown = fields.token_id("unknown")
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if with_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    if with_prefix:
        # Before a text that begins with a space, too: as SentencePiece and llama.cpp do.
        normalizers.insert(0, {"type": "Prepend", "prepend": _SPACE})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _scores(fields: GgufFields, tokens: Sequence[str], kinds: Sequence[int]) -> Sequence[float]:
    """By token: of two pairs the one is merged first whose token has the higher score."""
    scores = fields.header.metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not all(isinstance(score, int | float) for score in scores)
    ):
        raise fields.error("tokenizer.ggml.scores does not have a number for each token")
    normal = {score for score, kind in zip(scores, kinds, strict=True) if kind == _NORMAL}
    if fields.architecture.startswith("gemma") or len(normal) == 1:
        # Tokens are merged in their order in the file, which the scores of Gemma do not follow. A converter that had no
        # scores, but a tokenizer.json, gives all tokens the same one.
        return [-place for place in range(len(tokens))]
    return scores


def _merges_of(
    fields: GgufFields, tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, which has a score for each token instead: a pair is merged before
    another one if the token that it makes has the higher score."""
    is_text = {token for token, kind in zip(tokens, kinds, strict=True) if kind not in (_UNKNOWN, _CONTROL)}
    places = {token: place for place, token in enumerate(tokens)}
    # Where a token may be cut: bit n of a number stands for after n characters. So all cuts of a token are found at
    # once, however long it is and however many tokens it begins with.
    after_beginnings, before_ends = dict[str, int](), dict[str, int]()
    for text, beginning in _longest_beginnings(is_text).items():
        after_beginnings[text] = 0 if beginning is None else after_beginnings[beginning] | 1 << len(beginning)
    for text, end in _longest_beginnings({token[::-1] for token in is_text}).items():
        before_ends[text] = 0 if end is None else (before_ends[end] | 1) << len(text) - len(end)
    found: list[tuple[float, int, int, int, str, str]] = []
    num_chars = 0
    for token, score in zip(tokens, scores, strict=True):
        cuts = after_beginnings[token] & before_ends[token[::-1]] if token in is_text else 0
        while cuts:
            cut = cuts.bit_length() - 1
            cuts ^= 1 << cut
            left, right = token[:cut], token[cut:]
            num_chars += len(token)
            if num_chars > _MAX_MERGED_CHARS:
                raise fields.error(f"its tokens have merges of more than {_MAX_MERGED_CHARS} characters together")
            found.append((-score, -len(left), -len(right), places[left], left, right))
    found.sort(key=lambda merge: merge[:4])
    return [(left, right) for *_, left, right in found]


def _longest_beginnings(texts: Collection[str]) -> dict[str, str | None]:
    """For each of these texts, the longest other one that it begins with, except the empty text; None without one. A
    text comes after its beginnings."""
    found: dict[str, str | None] = {}
    # Each text in it begins with the one before. In sorted order, beginnings precede their continuations.
    open_texts: list[str] = []
    for text in sorted(texts):
        while open_texts and not text.startswith(open_texts[-1]):
            open_texts.pop()
        found[text] = open_texts[-1] if open_texts else None
        if text:
            open_texts.append(text)
    return found


def _bpe(tokens: Sequence[str], merges: Sequence[Sequence[str]], **further: Any) -> Mapping[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        "merges": merges,
        **further,
    }
