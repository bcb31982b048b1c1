"""Records operations, to run them again as one call."""

from collections.abc import Callable

import torch

from kernels.choice import fastest_for, recording_with
from kernels.cpu.bindings import CpuKernels
from kernels.cpu.library import Library
from kernels.cpu.recording import NotRecordableError, Recorder, Recording

__all__ = ["NotRecordableError", "Recording", "record"]


def record(num_tokens: int, run: Callable[[], None]) -> Recording:
    """Records what `run` does on the CPU by `kernels.ops`; it computes nothing now, so tensors have any content.

    Args:
        num_tokens: the first dimension of the tensors, the most tokens that the recording can be run with.
        run: the recording holds it, and with it the tensors that it uses.

    Raises:
        NotRecordableError: there is no CPU library, or `run` computes something else than its operations and views.
    """
    if not isinstance(fastest_for(torch.device("cpu")), CpuKernels):
        raise NotRecordableError("there is no CPU library")
    recorder = Recorder(Library(), num_tokens)
    with recorder, recording_with(recorder.kernels):
        run()
    return recorder.recording(run)
