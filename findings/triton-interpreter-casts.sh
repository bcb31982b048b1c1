#!/usr/bin/env bash
# The interpreter of Triton 3.8.0 (TRITON_INTERPRET=1) rounds and adds small floats as no device does.
#
# Expected: what `tensor.to` gives, but for ties and overflow, and 1 + 2 = 3.
# Seen: bfloat16 tiles are added by their bit patterns (1 + 2 is infinity). float32 to bfloat16 cuts the digits off,
# and gives another number below the normal range. To float8e4nv halves are rounded up, 480 is NaN, and **NaN becomes
# 384, 70,000 becomes 288**; to float8e5 480 becomes 256, since a carry does not reach the exponent. A kernel that is
# right on a device fails its test there, and one that overflows passes. 3.7.1 prints the same.
. "$(dirname "$0")/prelude.sh"
install triton==3.8.0 torch==2.13.0 numpy==2.4.6
cat >case.py <<'PY'
import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out):
    place = tl.arange(0, 2)
    tl.store(out + place, tl.load(x + place) + tl.load(y + place))


@triton.jit
def cast(x, out, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(x + place).to(out.dtype.element_ty))


ones, sums = torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)
add[(1,)](ones, 2 * ones, sums)
print("bfloat16 1 + 2:", sums[0].item())
NUMBERS = {
    torch.bfloat16: [1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, 1e-40],
    torch.float8_e4m3fn: [1.0625, 480, 70000, float("nan")],
    torch.float8_e5m2: [1.0625, 480, 70000, float("nan")],
}
for dtype, numbers in NUMBERS.items():
    source = torch.tensor(numbers)
    seen = torch.zeros(len(numbers), dtype=dtype)
    cast[(1,)](source, seen, len(numbers))
    print(dtype, [f"{number:.6g}" for number in numbers])
    print("  interpreter", [f"{number:.6g}" for number in seen.float().tolist()])
    print("  tensor.to  ", [f"{number:.6g}" for number in source.to(dtype).float().tolist()])
PY
run env/bin/python -W ignore case.py
expect <<'TEXT'
bfloat16 1 + 2: inf
torch.bfloat16 ['1.01172', '1.00391', '3.4e+38', '1e-40']
  interpreter ['1.00781', '1', '3.38953e+38', '1.01019e-39']
  tensor.to   ['1.01562', '1.00781', 'inf', '9.18355e-41']
torch.float8_e4m3fn ['1.0625', '480', '70000', 'nan']
  interpreter ['1.125', 'nan', '288', '384']
  tensor.to   ['1', '448', '448', 'nan']
torch.float8_e5m2 ['1.0625', '480', '70000', 'nan']
  interpreter ['1', '256', 'inf', 'nan']
  tensor.to   ['1', '512', 'inf', 'nan']
TEXT
