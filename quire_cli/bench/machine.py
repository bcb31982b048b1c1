"""The facts, in addition to its flags, that a result depends on: the commit and the machine."""

import os
import platform
import subprocess
from pathlib import Path

# The instruction sets of x86, best first.
_INSTRUCTION_SETS = (("amx_bf16", "amx"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"))
_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, object]:
    """Facts of the client's machine, which is the server's too if both run on one machine."""
    return {
        "processor": cpu_field("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instruction_set": _instruction_set(),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


def find_commit() -> str | None:
    """The commit of this checkout, with `-dirty` if files differ from it; None outside a checkout."""
    directory = str(Path(__file__).parent)
    return _output("git", "-C", directory, "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*") or None


def _instruction_set() -> str | None:
    flags = (cpu_field("flags") or "").split()
    return next((name for flag, name in _INSTRUCTION_SETS if flag in flags), None)


def _gpus() -> list[str]:
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def cpu_field(name: str) -> str | None:
    """A field of /proc/cpuinfo for the first processor, for example its "model name"."""
    if not _CPU_INFO.exists():
        return None
    for line in _CPU_INFO.read_text().splitlines():
        if line.split("\t")[0] == name:
            return line.partition(":")[2].strip()
    return None


def _output(*command: str) -> str:
    """The output of a program; empty if it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
