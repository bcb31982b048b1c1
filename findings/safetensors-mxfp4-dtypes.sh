#!/usr/bin/env bash
# safetensors 0.8.0 writes the dtypes of MXFP4 (F4, F8_E8M0), and reads them by one of its three ways only.
#
# Expected: what `save` writes, `load` and `get_slice` read.
# Seen: `load_file` reads both. `load`, which takes bytes, raises KeyError for both. `get_slice` reads F8_E8M0, and
# fails for each slice of F4, since the header counts numbers and torch's dtype holds two in one element. A loader
# that reads the rows of one rank by slices cannot read such a file.
. "$(dirname "$0")/prelude.sh"
install safetensors==0.8.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

pairs = torch.arange(8, dtype=torch.uint8).reshape(2, 4).view(torch.float4_e2m1fn_x2)
scales = torch.tensor([127, 128], dtype=torch.uint8).view(torch.float8_e8m0fnu)


def tried(read):
    try:
        return list(read().shape)
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


for name, tensor in (("F4", pairs), ("F8_E8M0", scales)):
    save_file({"a": tensor}, "a.safetensors")
    data = open("a.safetensors", "rb").read()
    print(name, "in torch:", list(tensor.shape))
    print("  load_file:", tried(lambda: load_file("a.safetensors")["a"]))
    print("  load:", tried(lambda: load(data)["a"]))
    with safe_open("a.safetensors", "pt") as file:
        print("  get_slice:", file.get_slice("a").get_shape(), tried(lambda: file.get_slice("a")[:1]))
PY
run env/bin/python case.py
expect <<'TEXT'
F4 in torch: [2, 4]
  load_file: [2, 4]
  load: KeyError: 'F4'
  get_slice: [2, 8] RuntimeError: shape '[2, 8]' is invalid for input of size 8
F8_E8M0 in torch: [2]
  load_file: [2]
  load: KeyError: 'F8_E8M0'
  get_slice: [2] [1]
TEXT
