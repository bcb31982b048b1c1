"""Devices by name, with the constants of their data sheets, and the size of the KV pool that fits next to a model."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.runtime.settings import ConfigurationError
from simulator.models import ModelShape

_GB, _GIB, _TERA = 1e9, 1 << 30, 1e12


@dataclass(frozen=True, slots=True)
class Hardware:
    """Equal devices that one model is split over, by tensor parallelism. All numbers are per device.

    Attributes:
        memory_bytes: Size of the memory; data sheets say GB and mean GiB.
        bandwidth: Bandwidth of the memory, bytes a second.
        flops: Dense products of 16-bit numbers, operations a second.
        link_bandwidth: Bandwidth to the other devices, one way, bytes a second.
        host_bandwidth: Bandwidth to host memory, one way, bytes a second.
        default_model: The model of a simulation that names none; None if it must name one.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    link_bandwidth: float
    host_bandwidth: float
    num_devices: int = 1
    default_model: str | None = None

    @classmethod
    def named(cls, name: str) -> "Hardware":
        """A device of the table, or several: `a100-80gb-x8`. Raises ConfigurationError."""
        match = re.fullmatch(r"(?P<device>.+?)(?:-x(?P<count>[1-9]\d{0,2}))?", name)
        device = DEVICES.get(match["device"]) if match else None
        if match is None or device is None:
            expected = f"{', '.join(DEVICES)}, each also as NAME-xN for N devices, up to 999"
            raise ConfigurationError(f'--hardware: "{name}" is not known; there are {expected}')
        count = int(match["count"] or 1)
        return replace(device, name=name, num_devices=count, default_model=_DEFAULT_MODELS.get((device.name, count)))

    def num_blocks(self, model: ModelShape, block_size: int, utilization: float) -> int:
        """Blocks that fit next to the weights into this share of the memory. The rest (activations, the allocator's
        losses) is not modelled. Raises ConfigurationError if the weights leave no room."""
        usable = int(self.num_devices * self.memory_bytes * utilization)
        room = usable - model.weight_bytes
        count = room // model.block_bytes(block_size)
        if count < 1:
            raise ConfigurationError(
                f"{model.name} has {model.weight_bytes / _GB:.1f} GB of weights, which leave no room for the KV pool: "
                f"{self.name} has {usable / _GB:.1f} GB to use (--gpu-memory-utilization {utilization:g})"
            )
        return count


# NVIDIA's data sheets: A100 (nvidia-a100-datasheet, 2021), H100 (nvidia-h100-datasheet, 2023) and H200
# (hpc-datasheet-sc23-h200, 2023), all of the SXM form. FLOP are dense (the sheets of Hopper print twice as many, with
# sparsity); NVLink and PCIe one way (the sheets print both).
DEVICES: Mapping[str, Hardware] = MappingProxyType(
    {
        device.name: device
        for device in (
            Hardware("a100-40gb", 40 * _GIB, 1555 * _GB, 312 * _TERA, 300 * _GB, 32 * _GB),
            Hardware("a100-80gb", 80 * _GIB, 2039 * _GB, 312 * _TERA, 300 * _GB, 32 * _GB),
            Hardware("h100", 80 * _GIB, 3350 * _GB, 989 * _TERA, 450 * _GB, 64 * _GB),
            Hardware("h200", 141 * _GIB, 4800 * _GB, 989 * _TERA, 450 * _GB, 64 * _GB),
        )
    }
)

_DEFAULT_MODELS = {
    # The paper's table 1.
    ("a100-40gb", 1): "opt-13b",
    ("a100-40gb", 4): "opt-66b",
    ("a100-80gb", 8): "opt-175b",
    ("h100", 1): "llama-3.1-8b",
    ("h200", 1): "llama-3.1-8b",
}

KERNEL_GAP_S = 0.9e-6
"""Time between two kernels of a stream without other waits: 3.8 us from start to start of kernels of 2.9 us (NVIDIA,
Getting Started with CUDA Graphs, 2019)."""

KERNELS_PER_LAYER = 12
"""Two norms, four products with a bias or an activation each, the write of keys and values, attention, two sums."""

COPY_LAUNCH_S = KERNEL_GAP_S
"""Time for each piece of a block that is swapped; a block has two pieces in each layer."""

COLLECTIVE_BASE_S, COLLECTIVE_HOP_S = 6.6e-6, 0.6e-6
"""Time of an all-reduce of few bytes over a ring of NVLink: a base, and a part for each of its 2 (n - 1) hops (NCCL
2.19, src/graph/tuning.cc, protocol LL)."""
