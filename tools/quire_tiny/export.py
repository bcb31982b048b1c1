"""Writes the model's directory: each file appears whole or not at all."""

import tempfile
from pathlib import Path

from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from tools.quire_tiny.corpus import held_out_texts
from tools.quire_tiny.model import MAX_LENGTH
from tools.quire_tiny.tokenizer import save_tokenizer
from tools.quire_tiny.tokens import BOS_ID, END_ID, EOS_ID, PAD_ID

HELD_OUT_SEED = 99
_HELD_OUT_TEXTS = 390


def _in_bfloat16(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy; the trained float32 weights stay as they are."""
    copy = LlamaForCausalLM(model.config).bfloat16()
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def _generation_config() -> GenerationConfig:
    return GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, END_ID],
        pad_token_id=PAD_ID,
    )


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch)
        copy = _in_bfloat16(model)
        copy.generation_config = _generation_config()
        copy.save_pretrained(made)
        save_tokenizer(tokenizer, made, MAX_LENGTH)
        (made / "heldout.txt").write_text("\n\n".join(held_out_texts(HELD_OUT_SEED, _HELD_OUT_TEXTS)) + "\n")
        for path in sorted(made.iterdir()):
            path.chmod(0o644)  # safetensors writes for the owner alone
            path.replace(directory / path.name)
