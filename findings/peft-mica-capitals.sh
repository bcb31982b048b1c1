#!/usr/bin/env bash
# peft 0.21.2: `init_lora_weights="MiCA"` trains what MiCA freezes; "mica" does not.
#
# Expected: the method's own spelling is the method, or an error.
# Seen: the initialisation compares in lower case and runs for both; what freezes lora_B compares exactly. With "MiCA"
# A is zero and B holds singular vectors, as it should, and B is trained. Nothing is said.
. "$(dirname "$0")/prelude.sh"
install peft==0.21.2 accelerate==1.15.0 transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
for name in ("mica", "MiCA"):
    model = get_peft_model(
        LlamaForCausalLM(LlamaConfig(**SIZES)), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=name)
    )
    for parameter, value in model.named_parameters():
        if "lora" in parameter:
            kind = parameter.split(".")[-3]
            print(name, kind, "zero" if not value.any() else "not zero", "trained" if value.requires_grad else "frozen")
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
mica lora_A zero trained
mica lora_B not zero frozen
MiCA lora_A zero trained
MiCA lora_B not zero trained
TEXT
