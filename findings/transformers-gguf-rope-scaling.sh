#!/usr/bin/env bash
# transformers 5.23.0 reads GGUF files without their rotation scaling, and says nothing.
#
# Expected: `rope_freqs.weight` (how llama.cpp's converter writes Llama 3's scaling) and the metadata
# `rope.scaling.type` linear and yarn change config and logits, as they do in llama.cpp.
# Seen: rope_type is "default" and the logits are equal to the bit with and without each of them. A Llama 3.1 loaded
# from GGUF is another model beyond 8,192 tokens, and in its long wavelengths before.
. "$(dirname "$0")/prelude.sh"
install torch==2.13.0 transformers==5.23.0 gguf==0.19.0 numpy==2.4.6 accelerate==1.15.0
cat >case.py <<'PY'
import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

HIDDEN, HEADS, HEAD, INNER, VOCABULARY = 16, 2, 8, 32, 32
SHAPES = {
    "attn_q": (HEADS * HEAD, HIDDEN), "attn_k": (HEAD, HIDDEN), "attn_v": (HEAD, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD), "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}  # fmt: skip


def write(name, extra=lambda writer: None, factors=None):
    writer = gguf.GGUFWriter(f"{name}.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(VOCABULARY)])
    writer.add_token_merges([])
    extra(writer)
    draw = np.random.default_rng(0)
    tensors = {"token_embd": (VOCABULARY, HIDDEN), "output": (VOCABULARY, HIDDEN)}
    tensors |= {f"blk.0.{key}": shape for key, shape in SHAPES.items()}
    for key, shape in tensors.items():
        writer.add_tensor(f"{key}.weight", draw.normal(size=shape).astype(np.float32))
    for key in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{key}.weight", np.ones(HIDDEN, np.float32))
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def linear(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(1024)


write("plain")
write("rope_freqs", factors=[1, 1, 8, 8])
write("linear", linear)
write("yarn", yarn)
plain = None
for name in ("plain", "rope_freqs", "linear", "yarn"):
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file=f"{name}.gguf", dtype=torch.float32)
    logits = model(torch.arange(20)[None]).logits
    plain = logits if plain is None else plain
    print(name, model.config.rope_parameters["rope_type"], "equal logits:", torch.equal(logits, plain))
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
plain default equal logits: True
rope_freqs default equal logits: True
linear default equal logits: True
yarn default equal logits: True
TEXT
