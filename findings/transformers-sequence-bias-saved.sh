#!/usr/bin/env bash
# transformers 5.23.0: a model that is saved with `sequence_bias` in its documented form cannot generate once loaded.
#
# Expected: `GenerationConfig(sequence_bias={(1, 2): -3.0})` is the same after save_pretrained and from_pretrained.
# Seen: JSON has no tuples as keys, so the file has the text "(1, 2)", which comes back as text. `generate` raises
# ValueError, and names neither the file nor the form that survives: lists, [[[1, 2], -3.0]].
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(**SIZES))
for bias in ({(1, 2): -3.0}, [[[1, 2], -3.0]]):
    GenerationConfig(sequence_bias=bias).save_pretrained("saved")
    for name, config in {
        "made": GenerationConfig(sequence_bias=bias),
        "loaded": GenerationConfig.from_pretrained("saved"),
    }.items():
        try:
            model.generate(torch.tensor([[5, 6]]), generation_config=config, max_new_tokens=2)
            seen = "generates"
        except ValueError as error:
            seen = f"ValueError: {str(error)[:65]}"
        print(name, config.sequence_bias, seen)
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
made {(1, 2): -3.0} generates
loaded {'(1, 2)': -3.0} ValueError: `sequence_bias` has to be a dict with tuples as keys, but is {'(1
made [[[1, 2], -3.0]] generates
loaded [[[1, 2], -3.0]] generates
TEXT
