"""What recording costs a process that starts."""

import subprocess
import sys

RECORD = """
import sys
import torch
from kernels import ops
from kernels.cpu.recording import record

x, weight = torch.ones(2, 8), torch.ones(8)
record(2, lambda: ops.rms_norm(x, weight, 1e-6))
print("torch._dynamo" in sys.modules)
"""


def test_torch_s_compiler_is_not_imported():
    said = subprocess.run([sys.executable, "-c", RECORD], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "False\n"
