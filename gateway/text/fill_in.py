"""Fill in the middle: prompts of the texts before and after the generated one, in a model's own tokens."""

from gateway.text.tokenizer import Tokenizer

# Tokens before the earlier text, the later text and the answer. Without the third the later text comes first.
_KNOWN = (
    # Qwen, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # GLM
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    # Codestral
    ("[PREFIX]", "[SUFFIX]", None),
)


def fill_in_prompt(tokenizer: Tokenizer, before: str, after: str) -> str | None:
    """The prompt whose continuation belongs between two texts; None if the tokenizer has no tokens for that."""
    for prefix, suffix, middle in _KNOWN:
        if all(each is None or tokenizer.id_of(each) is not None for each in (prefix, suffix, middle)):
            if middle is None:
                return f"{suffix}{after}{prefix}{before}"
            return f"{prefix}{before}{suffix}{after}{middle}"
    return None
