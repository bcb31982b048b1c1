#!/usr/bin/env bash
# transformers 5.23.0: Youtu loses the embedding of the padding token when a checkpoint is loaded.
#
# Expected: `from_pretrained` returns the weights that `save_pretrained` wrote.
# Seen: the row of `pad_token_id` is zero. `YoutuPreTrainedModel._init_weights` fills it with zeros through
# `module.weight.data`, which lacks the mark of a tensor that was loaded. The same class with `pad_token_id=None` loses
# nothing, and neither does LLaMA. With tied embeddings the logits of the token are lost, too.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, YoutuConfig, YoutuForCausalLM

SIZES = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
LATENT = {"num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
LATENT |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
for name, model_class, config in (
    ("llama, padding token 3", LlamaForCausalLM, LlamaConfig(**SIZES, pad_token_id=3)),
    ("youtu, padding token 3", YoutuForCausalLM, YoutuConfig(**SIZES, **LATENT, pad_token_id=3)),
    ("youtu, no padding token", YoutuForCausalLM, YoutuConfig(**SIZES, **LATENT, pad_token_id=None)),
):
    made = model_class(config)
    with torch.no_grad():
        made.model.embed_tokens.weight.fill_(0.5)
    made.save_pretrained("saved")
    loaded = model_class.from_pretrained("saved")
    weight = loaded.model.embed_tokens.weight
    lost = [row for row in range(8) if not weight[row].any()]
    with torch.inference_mode():
        logits = loaded(torch.tensor([[5, 6]])).logits[0, -1]
    print(f"{name}: rows of zeros {lost}; logits of zero {[row for row in range(8) if logits[row] == 0]}")
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
llama, padding token 3: rows of zeros []; logits of zero []
youtu, padding token 3: rows of zeros [3]; logits of zero [3]
youtu, no padding token: rows of zeros []; logits of zero []
TEXT
