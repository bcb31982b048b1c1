"""What a result depends on besides its flags: the commit and the machine."""

import os
import platform
import subprocess
from pathlib import Path

# Of x86, the best that a processor has.
_INSTRUCTION_SETS = (("amx_bf16", "amx"), ("avx512_bf16", "avx512_bf16"), ("avx512f", "avx512"), ("avx2", "avx2"))
_CPU_INFO = Path("/proc/cpuinfo")


def describe_machine() -> dict[str, object]:
    """Of the client, which is the server's where both run on one machine."""
    return {
        "processor": cpu_field("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "instruction_set": _instruction_set(),
        "gpus": _gpus(),
        "python": platform.python_version(),
    }


def find_commit() -> str | None:
    """The commit of this checkout, with `-dirty` where files differ from it; None outside a checkout."""
    directory = str(Path(__file__).parent)
    return _output("git", "-C", directory, "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*") or None


def _instruction_set() -> str | None:
    flags = (cpu_field("flags") or "").split()
    return next((name for flag, name in _INSTRUCTION_SETS if flag in flags), None)


def _gpus() -> list[str]:
    return _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def cpu_field(name: str) -> str | None:
    """What /proc/cpuinfo says of the first processor, for example its "model name"."""
    if not _CPU_INFO.exists():
        return None
    for line in _CPU_INFO.read_text().splitlines():
        if line.split("\t")[0] == name:
            return line.partition(":")[2].strip()
    return None


def _output(*command: str) -> str:
    """What a program prints; nothing where it is not installed or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
