#!/usr/bin/env bash
# bitsandbytes 0.50.2 on a CPU with AVX-512 BF16: a 4-bit layer that has run is saved as another layer.
#
# Expected: a layer gives the same outputs before it is saved and after it is loaded, whether it has run or not; and
# `dequantize_4bit` gives back what `quantize_4bit` was given, within the steps of the 4-bit codes.
# Seen: the first run packs codes and scales for the CPU. Saving unpacks the codes, and with double quantization the
# scales, too; without it they stay in the order of the CPU, [inputs / 64, outputs] in bfloat16. Loading takes them for
# scales in the usual order: no error, other outputs. And where the inputs of a layer are not a multiple of 64, blocks
# of scales go on in the next row when weights are quantized, while the CPU's dequantization begins a block in each row.
. "$(dirname "$0")/prelude.sh"
if ! grep -q avx512_bf16 /proc/cpuinfo; then
  echo "this processor has no AVX-512 BF16: layers are not packed for it" >&2
  exit 1
fi
install bitsandbytes==0.50.2 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitsandbytes.nn import Linear4bit, Params4bit

torch.manual_seed(0)
weight, inputs = torch.randn(128, 256), torch.randn(8, 256)
print("bitsandbytes", bitsandbytes.__version__)


def make(double):
    layer = Linear4bit(256, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=double)
    layer.weight = Params4bit(
        weight.clone(), requires_grad=False, quant_type="nf4", blocksize=64, compress_statistics=double, module=layer
    )
    return layer.to("cpu").eval()


def load(state, double):
    layer = make(double)
    parts = {name.removeprefix("weight."): tensor for name, tensor in state.items() if name != "weight"}
    layer.weight = Params4bit.from_prequantized(state["weight"], parts, device="cpu", module=layer)
    return layer


for double in (False, True):
    for has_run in (False, True):
        layer = make(double)
        with torch.no_grad():
            expected = make(double)(inputs)
            if has_run:
                layer(inputs)
            state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
            found = load(state, double)(inputs)
        error = float((found - expected).norm() / expected.norm())
        scales = state["weight.absmax"]
        print(
            f"double quantization {double}, has run {has_run}: scales {list(scales.shape)} {scales.dtype},",
            "outputs as before" if error < 0.02 else "other outputs",
        )
for num_inputs in (64, 96, 128, 160):
    weight = torch.randn(64, num_inputs)
    codes, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")
    numbers = state.code[torch.stack((codes.flatten() >> 4, codes.flatten() & 15), -1).flatten().int()]
    flat = (numbers * state.absmax.repeat_interleave(64)).view_as(weight)
    own = dequantize_4bit(codes, state)
    print(
        f"{num_inputs} inputs: largest error below 0.8 by dequantize_4bit: {bool((own - weight).abs().max() < 0.8)},",
        f"with blocks that go on in the next row: {bool((flat - weight).abs().max() < 0.8)}",
    )
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
bitsandbytes 0.50.2
double quantization False, has run False: scales [512] torch.float32, outputs as before
double quantization False, has run True: scales [4, 128] torch.bfloat16, other outputs
double quantization True, has run False: scales [512] torch.uint8, outputs as before
double quantization True, has run True: scales [512] torch.uint8, outputs as before
64 inputs: largest error below 0.8 by dequantize_4bit: True, with blocks that go on in the next row: True
96 inputs: largest error below 0.8 by dequantize_4bit: False, with blocks that go on in the next row: True
128 inputs: largest error below 0.8 by dequantize_4bit: True, with blocks that go on in the next row: True
160 inputs: largest error below 0.8 by dequantize_4bit: False, with blocks that go on in the next row: True
TEXT
