"""Which architectures of GGUF files are read, and why others are not, as the table in the documentation has them."""

import textwrap
from collections.abc import Iterable

from quire.model_files.gguf_encoders import ENCODER_CONFIGS
from quire.model_files.gguf_families import CONFIGS
from tests.real.families import DOCUMENT

# A name that llama.cpp does not have.
_FURTHER = {"mistral"}
REFUSED: dict[str, tuple[str, ...]] = {
    "layers that keep a state of fixed size, of a kind that is not read": (
        *("plamo2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "kimi-linear"),
    ),
    "no model that continues texts: other encoders, sound, the parts that read images": (
        *("clip", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert", "t5", "t5encoder"),
        *("llama-embed", "wavtokenizer-dec"),
    ),
    "tokens attend to later ones (diffusion)": ("dream", "llada", "llada-moe", "rnd1"),
    "no rotation: ALiBi, or learned positions": ("bloom", "jais", "mpt", "refact", "starcoder"),
    "attention and MLP side by side, each with a norm of its own": ("falcon", "gptneox"),
    "parts of the described decoder, in a combination that no row has": ("dbrx", "gptj", "phi2", "plamo", "plamo3"),
    "layers of different sizes": ("deci", "openelm"),
    "sparse or chunked attention": ("glm-dsa", "llama4"),
    "gates on attention, or heads whose keys and values differ in size": ("afmoe", "mimo2", "step35"),
    "MLPs, experts or norms that the described decoder does not have": (
        *("apertus", "arctic", "bitnet", "chameleon", "cogvlm", "grok", "grovemoe", "smallthinker"),
    ),
    "latents with queries that grow with their position": ("mistral4",),
    "not in the package gguf with which Quire is tested": (
        *("bailingmoe3", "cohere2moe", "deepseek32", "deepseek4", "dflash", "dots3note", "eagle3", "gemma4-assistant"),
        *("glm5-next", "granite_swa", "graniteswitch", "hrm_text", "hy_v4", "kimi-k3", "laguna", "maple", "mellum"),
        *("minimax-01", "minimax-m3", "muse-glimmer", "nanbeige", "pockettts", "qwen3tts", "qwen4exp", "spark2_5"),
        "talkie",
    ),
}
"""Architectures of llama.cpp that are refused, by the reason."""

_BEGIN, _END = "<!-- Made by `python -m tests.real.gguf_names`: begin -->\n", "<!-- end of names -->\n"


def _item(text: str, names: Iterable[str]) -> list[str]:
    quoted = ", ".join(f"`{name}`" for name in sorted(names))
    return textwrap.wrap(
        f"- {text}: {quoted}", 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def documented(text: str) -> str:
    """docs/models.md with the architectures as they are here."""
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    count = len(CONFIGS.keys() - _FURTHER)
    lines = [*_item(f"read, {count}", CONFIGS.keys() - _FURTHER)]
    lines += _item(f"read, encoders, {len(ENCODER_CONFIGS)}", ENCODER_CONFIGS)
    lines += [line for reason, names in REFUSED.items() for line in _item(f"refused, {reason}", names)]
    return before + _BEGIN + "\n" + "\n".join(lines) + "\n\n" + _END + after


if __name__ == "__main__":
    DOCUMENT.write_text(documented(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
