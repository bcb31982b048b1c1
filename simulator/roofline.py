"""The roofline: a step takes the time of its bytes at the memory's bandwidth or of its products at the device's peak,
whichever is more, plus the time of launches and collectives.

No constant is fitted to anything: all come from data sheets (see `hardware`). Real kernels attain less than the peak,
so a real device is slower; `efficiency` is the share that they attain. If there is a device to measure, use the model
`measured` instead.
"""

from dataclasses import dataclass

from scheduler_svc.core.step import StepWork
from simulator.costs import StepSeconds
from simulator.hardware import (
    COLLECTIVE_BASE_S,
    COLLECTIVE_HOP_S,
    COPY_LAUNCH_S,
    KERNEL_GAP_S,
    KERNELS_PER_LAYER,
    Hardware,
)
from simulator.models import ModelShape

_STATE_ELEMENT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Roofline:
    """The cost of steps of one model on one kind of hardware.

    Attributes:
        block_size: Tokens of a block, for blocks that are copied and swapped.
        efficiency: The share of the peaks of memory and products that kernels attain, in (0, 1].
    """

    model: ModelShape
    hardware: Hardware
    block_size: int = 16
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is {self.efficiency:g}, must be in (0, 1]")

    def seconds(self, work: StepWork) -> StepSeconds:
        # Linear layers and attention take turns, so their times add up.
        mixing = self._attention(work) + self._states(work)
        device = self._swaps(work) + self._copies(work) + self._linear(work) + mixing
        return StepSeconds(device + self._launches() + self._collectives(work))

    def _linear(self, work: StepWork) -> float:
        model, head = self.model, self.model.head_parameters
        read = (model.layer_parameters + (head if work.num_samples else 0)) * model.dtype_bytes
        flop = 2 * (model.layer_parameters * work.num_tokens + head * work.num_samples)
        return self._longer(read, flop)

    def _attention(self, work: StepWork) -> float:
        model, num_rows = self.model, work.num_tokens - work.num_chunk_tokens + work.num_chunks
        # Tokens that the layers read, and that they attend to: at most a window for each row, and for each new token.
        context = model.read_tokens(work.context_tokens, num_rows * model.window + work.num_tokens)
        attended = model.read_tokens(work.attended_pairs, work.num_tokens * model.window)
        moved = (context + work.num_tokens) * model.slot_bytes
        # Scores and the sum of values: a multiplication and an addition for each element of a head, twice.
        flop = 4 * model.num_attending * model.num_heads * model.head_dim * attended
        return self._longer(moved, flop)

    def _states(self, work: StepWork) -> float:
        """Each row's state is read and written once; each token changes it, with a multiplication and an addition for
        each element, and reads it twice in the same way."""
        size, num_rows = self.model.state_bytes, work.num_tokens - work.num_chunk_tokens + work.num_chunks
        return self._longer(2 * size * num_rows, 6 * size / _STATE_ELEMENT_BYTES * work.num_tokens)

    def _longer(self, num_bytes: float, flop: float) -> float:
        hardware = self.hardware
        slower = max(num_bytes / hardware.bandwidth, flop / hardware.flops)
        return slower / (hardware.num_devices * self.efficiency)

    def _launches(self) -> float:
        return self.model.num_layers * KERNELS_PER_LAYER * KERNEL_GAP_S

    def _collectives(self, work: StepWork) -> float:
        """Two sums of each layer's output over all devices."""
        count = self.hardware.num_devices
        if count == 1:
            return 0.0
        hops = 2 * (count - 1)
        moved = hops / count * work.num_tokens * self.model.hidden_size * self.model.dtype_bytes
        each = COLLECTIVE_BASE_S + hops * COLLECTIVE_HOP_S + moved / self.hardware.link_bandwidth
        return 2 * self.model.num_layers * each

    def _copies(self, work: StepWork) -> float:
        """Each block is read and written."""
        moved = 2 * work.copied_blocks * self.model.block_bytes(self.block_size)
        return moved / (self.hardware.bandwidth * self.hardware.num_devices)

    def _swaps(self, work: StepWork) -> float:
        """Swaps run before the step. Many small pieces take longer to launch than to move."""
        pieces = work.swapped_blocks * 2 * self.model.cut(self.block_size)[0]
        moved = work.swapped_blocks * self.model.block_bytes(self.block_size) / self.hardware.num_devices
        return max(moved / self.hardware.host_bandwidth, pieces * COPY_LAUNCH_S)
