"""The package as others see it."""

import subprocess
import sys


def test_package_imports_neither_torch_nor_triton() -> None:
    check = "import sys, kernels; assert kernels.__version__; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=30)
