#!/usr/bin/env bash
# torch 2.13.0 computes GELU of the same float32 numbers to other bits where they lie apart in memory.
#
# Expected: an elementwise function gives each number the same result, however the numbers lie. So it is for SiLU, tanh,
# erf and the exponential function. Seen on x86 (AVX-512): contiguous tensors take the GELU of oneDNN, slices of a wider
# tensor torch's own loop; of the exact form about two thirds of the results differ, by a few of the last places. So a
# gated layer whose gate is a slice, as `gelu(x[:, :n]) * x[:, n:]` in many models, gives a single row (which is
# contiguous) other bits than the same row among others: results depend on the size of the batch.
. "$(dirname "$0")/prelude.sh"
install torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from torch.nn import functional

torch.manual_seed(0)
wide = torch.randn(8, 8192)
gates = wide[:, :4096]


def differ(function, a, b):
    return int((function(a) != function(b)).sum())


FUNCTIONS = {"silu": functional.silu, "tanh": torch.tanh, "erf": torch.erf, "exp": torch.exp, "gelu": functional.gelu}
for name, function in FUNCTIONS.items():
    of_all = differ(function, gates, gates.contiguous()) / gates.numel()
    of_row = int((function(gates)[0] != function(gates[:1])[0]).sum())
    print(f"{name}: {'some' if of_all > 0.1 else 'none' if of_all == 0 else 'few'} of the slice differ from its copy,",
          f"{'some' if of_row else 'none'} of a row from the row by itself")
largest = (functional.gelu(gates) - functional.gelu(gates.contiguous())).abs().max().item()
print("largest difference below 1e-6:", largest < 1e-6)
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
silu: none of the slice differ from its copy, none of a row from the row by itself
tanh: none of the slice differ from its copy, none of a row from the row by itself
erf: none of the slice differ from its copy, none of a row from the row by itself
exp: none of the slice differ from its copy, none of a row from the row by itself
gelu: some of the slice differ from its copy, some of a row from the row by itself
largest difference below 1e-6: True
TEXT
