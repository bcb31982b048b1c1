"""Fill in the middle: prompts of the texts before and after the generated one, in a model's own tokens."""

from dataclasses import dataclass

from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Marks:
    """Tokens before the two texts and the answer. Without `middle` the later text comes first, as Codestral learned."""

    prefix: str
    suffix: str
    middle: str | None


_KNOWN = (
    # Qwen, CodeGemma
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek
    _Marks("<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}begin\N{FULLWIDTH VERTICAL LINE}>",
           "<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}hole\N{FULLWIDTH VERTICAL LINE}>",
           "<\N{FULLWIDTH VERTICAL LINE}fim\N{LOWER ONE EIGHTH BLOCK}end\N{FULLWIDTH VERTICAL LINE}>"),
    # GLM
    _Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Codestral
    _Marks("[PREFIX]", "[SUFFIX]", None),
)  # fmt: skip


def fill_in_prompt(tokenizer: Tokenizer, before: str, after: str) -> str | None:
    """The prompt whose continuation belongs between two texts; None if the tokenizer has no tokens for that."""
    for marks in _KNOWN:
        if all(
            each is None or tokenizer.id_of(each) is not None for each in (marks.prefix, marks.suffix, marks.middle)
        ):
            if marks.middle is None:
                return f"{marks.suffix}{after}{marks.prefix}{before}"
            return f"{marks.prefix}{before}{marks.suffix}{after}{marks.middle}"
    return None
