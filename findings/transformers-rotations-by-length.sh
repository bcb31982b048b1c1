#!/usr/bin/env bash
# transformers 5.23.0: rotations that change with the length of a sequence depend on its neighbours, or on nothing.
#
# Expected: LongRoPE and dynamic NTK take a sequence's own length; `long_factor` of Phi-3.5-MoE counts beyond the
# original length.
# Seen: the longest sequence of the batch decides, so that a short prompt has other logits next to a long one than
# alone (Phi-3, LongRoPE; Llama, dynamic). `PhimoeRotaryEmbedding` computes the long frequencies and then uses others:
# `long_factor` 1 and 8 rotate alike at any length.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, PhimoeConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
MODELS = {
    "Phi-3, longrope": Phi3ForCausalLM(
        Phi3Config(**SIZES, original_max_position_embeddings=16, rope_parameters=LONG)
    ),
    "Llama, dynamic": LlamaForCausalLM(LlamaConfig(**SIZES | {"max_position_embeddings": 16}, rope_parameters=DYNAMIC)),
}
short = torch.arange(1, 9)
long = torch.arange(1, 33)
for name, model in MODELS.items():
    model.eval()
    with torch.no_grad():
        alone = model(short[None]).logits[0, -1]
        # Padded at the end: causal attention of the short prompt sees nothing of it.
        batch = torch.stack([torch.nn.functional.pad(short, (0, 24)), long])
        mask = torch.stack([torch.arange(32) < 8, torch.ones(32, dtype=torch.bool)]).long()
        together = model(batch, attention_mask=mask).logits[0, 7]
    print(f"{name}: a short prompt next to a long one is as by itself: {torch.allclose(alone, together, atol=1e-4)}")


def rotated(factor):
    config = PhimoeConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=128,
        rope_parameters=LONG | {"long_factor": [factor] * 4, "short_mscale": 1.0, "long_mscale": 1.0,
                                "original_max_position_embeddings": 16},
    )  # fmt: skip
    return PhimoeRotaryEmbedding(config)(torch.zeros(1), torch.arange(64)[None])[0]


print("Phi-3.5-MoE: long_factor counts:", not torch.equal(rotated(1.0), rotated(8.0)))
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
Phi-3, longrope: a short prompt next to a long one is as by itself: False
Llama, dynamic: a short prompt next to a long one is as by itself: False
Phi-3.5-MoE: long_factor counts: False
TEXT
