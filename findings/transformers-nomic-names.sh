#!/usr/bin/env bash
# transformers 5.23.0 reads none of the sizes in the config.json that models of the type nomic_bert were published with.
#
# Expected: a model type of the library reads the keys that files of this type have (n_embd, n_layer, n_positions, ...),
# as it does for GPT-2, whose names these are. Published files name their own code in `auto_map`; the library's class of
# this type is taken if that code is not trusted.
# Seen: that class has other names for all of them, and keeps the old ones as attributes without a meaning. It takes the
# sizes of the first published model, and says nothing: another base of rotations is 1000, 8192 positions are 2048.
. "$(dirname "$0")/prelude.sh"
install transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import json
import tempfile
from pathlib import Path

from transformers import AutoConfig

# The keys that files of this type have.
WILD = {
    "model_type": "nomic_bert", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_inner": 128, "n_positions": 8192,
    "rotary_emb_base": 5000, "activation_function": "swiglu", "layer_norm_epsilon": 1e-6, "vocab_size": 100,
}  # fmt: skip
with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(WILD))
    config = AutoConfig.from_pretrained(folder)
for wild, own in (
    ("n_embd", "hidden_size"), ("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers"),
    ("n_inner", "intermediate_size"), ("n_positions", "max_position_embeddings"),
    ("layer_norm_epsilon", "layer_norm_eps"), ("activation_function", "hidden_act"),
):
    print(wild, WILD[wild], "->", own, getattr(config, own))
print("rotary_emb_base", WILD["rotary_emb_base"], "-> rope_theta", config.rope_parameters["rope_theta"])
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
n_embd 64 -> hidden_size 768
n_head 4 -> num_attention_heads 12
n_layer 3 -> num_hidden_layers 12
n_inner 128 -> intermediate_size 3072
n_positions 8192 -> max_position_embeddings 2048
layer_norm_epsilon 1e-06 -> layer_norm_eps 1e-12
activation_function swiglu -> hidden_act silu
rotary_emb_base 5000 -> rope_theta 1000.0
TEXT
