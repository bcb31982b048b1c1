"""The shape of quire-tiny."""

from transformers import LlamaConfig, LlamaForCausalLM

from tools.quire_tiny.tokenizer import VOCABULARY_SIZE
from tools.quire_tiny.tokens import BOS_ID, END_ID, EOS_ID, PAD_ID

MAX_LENGTH = 1024


def make_model() -> LlamaForCausalLM:
    """Random weights in float32; seed torch before."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=[EOS_ID, END_ID],
        pad_token_id=PAD_ID,
        initializer_range=0.02,
    )
    return LlamaForCausalLM(config)
