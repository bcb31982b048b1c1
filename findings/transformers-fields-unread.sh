#!/usr/bin/env bash
# transformers 5.23.0: three fields of configurations that change nothing, or something else.
#
# Expected: `truncate: false` of YaRN counts in the section of one type of layers, as it does for all layers together;
# `num_experts_per_tok` of Phi-3.5-MoE is the number of experts of a token; no shared experts are none.
# Seen: `truncate` is read beside the sections, where no configuration has it; every token has two experts, whatever
# the field says; HunYuan 3 without shared experts has one with the size of a dense layer, since 0 is "not given".
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from transformers import (
    HYV3Config, HYV3ForCausalLM, LlamaConfig, LlamaForCausalLM, Olmo3Config, Olmo3ForCausalLM, PhimoeConfig,
    PhimoeForCausalLM,
)

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}


def logits(model_class, config):
    torch.manual_seed(0)
    with torch.no_grad():
        return model_class(config).eval()(torch.arange(1, 40)[None]).logits


def sections(rope):
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


for model_class, config_class, make in (
    (LlamaForCausalLM, LlamaConfig, lambda rope: rope),
    (Olmo3ForCausalLM, Olmo3Config, sections),
):
    fields = SIZES | ({"layer_types": ["full_attention"] * 2} if make is sections else {})
    found = [
        logits(model_class, config_class(**fields, rope_parameters=make(YARN | {"truncate": truncate})))
        for truncate in (True, False)
    ]
    print(f"{model_class.__name__}: truncate counts:", not torch.equal(*found))

chosen = [
    logits(PhimoeForCausalLM, PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=count)) for count in (1, 2)
]
print("Phi-3.5-MoE: num_experts_per_tok counts:", not torch.equal(*chosen))
config = HYV3Config(
    **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_shared_experts=0,
    first_k_dense_replace=1,
)  # fmt: skip
layer = HYV3ForCausalLM(config).model.layers[1].mlp
print("HunYuan 3: inner size of no shared experts:", layer.shared_experts.intermediate_size)
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
LlamaForCausalLM: truncate counts: True
Olmo3ForCausalLM: truncate counts: False
Phi-3.5-MoE: num_experts_per_tok counts: False
HunYuan 3: inner size of no shared experts: 48
TEXT
