"""Records operations of the CPU library, to run them again as one call in one parallel region.

One call for all of a model's layers, instead of one for each operation, saves the time between operations: Python, the
wait for the interpreter lock, and threads that fall asleep and wake.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from quire_kernels.backends import fastest_for, recording_with
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import Arguments, Library, Operation, RecordedOperation, RunArgs

_CACHE_LINE = 64


class NotRecordableError(Exception):
    """A computation that is not an operation of the library over lines of tokens. The message names it."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operation with its arguments, and the number of lines per token."""

    operation: Operation
    arguments: Arguments
    lines_per_token: int


class Recording:
    """Operations to run one after the other.

    Args:
        held: owns the memory that the calls name. It lives as long as the recording.
    """

    def __init__(self, library: Library, calls: Sequence[RecordedCall], held: object) -> None:
        self.calls = tuple(calls)
        self._library = library
        self._held = held
        self._operations = (RecordedOperation * len(calls))(
            *((call.operation.number, addressof(call.arguments), call.lines_per_token) for call in calls)
        )

    def part(self, choose: Callable[[RecordedCall], bool]) -> "Recording":
        """The chosen operations, over the same tensors: to measure them."""
        return Recording(self._library, [call for call in self.calls if choose(call)], self._held)

    def run(self, num_tokens: int, num_rows: int) -> None:
        """Runs all operations for the first `num_tokens` lines and `num_rows` rows of the recorded tensors.

        Raises:
            IndexError: an index tensor is out of range. Nothing was written.
        """
        arguments = RunArgs(
            operations=addressof(self._operations),
            num_operations=len(self.calls),
            num_tokens=num_tokens,
            num_rows=num_rows,
        )
        self._library.call(Operation.RUN, arguments)


def record(num_tokens: int, run: Callable[[], None]) -> Recording:
    """Records the operations that `run` calls on the CPU. Nothing is computed yet, so tensors have any content.

    Args:
        num_tokens: the first dimension of the tensors: the largest number of tokens that the recording can run with.
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


class Recorder:
    """Replaces the library while operations are recorded: it stores the calls and runs none.

    The results have their final shape and address, but no content yet. Use it as a context manager, within which
    nothing else may be computed: views only.

    Args:
        num_tokens: the first dimension of the recorded tensors, the largest number of tokens that a run can have.
    """

    def __init__(self, library: Library, num_tokens: int) -> None:
        self.isa = library.isa
        self._library = library
        self._num_tokens = num_tokens
        self._calls: list[RecordedCall] = []
        self._memory = _ReusedMemory()
        self._mode = _NothingButViews()
        self.kernels = CpuKernels(self, self._memory.empty)

    def __enter__(self) -> "Recorder":
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def recording(self, owner: object) -> Recording:
        """The recording. It keeps `owner` alive, which holds all tensors that were not made meanwhile."""
        return Recording(self._library, self._calls, (self._memory.blocks, owner))

    def call(self, operation: Operation, arguments: Arguments) -> None:
        name = operation.name.lower()
        if operation.lines_field is None:
            raise NotRecordableError(f"{name} cannot be recorded")
        lines = getattr(arguments, operation.lines_field)
        if not lines or lines % self._num_tokens:
            raise NotRecordableError(f"{name} over {lines} lines, which {self._num_tokens} tokens do not divide")
        arguments.threads = torch.get_num_threads()
        self._calls.append(RecordedCall(operation, arguments, lines // self._num_tokens))


class _NothingButViews(TorchDispatchMode):
    """Refuses every operation of torch whose result is not a view of its arguments."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler with the first operation, which takes a second or two.
        return False

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        returns = func._schema.returns
        if not returns or any(each.alias_info is None or each.alias_info.is_write for each in returns):
            raise NotRecordableError(f"{func} is computed by torch")
        return func(*args, **(kwargs or {}))


class _ReusedMemory:
    """Makes tensors in memory that is reused as soon as nothing refers to the tensor or a view of it."""

    def __init__(self) -> None:
        self.blocks: list[NDArray[np.uint8]] = []
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // _CACHE_LINE) * _CACHE_LINE
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        # The tensor keeps this view of the block alive; when the view dies, the block is free again.
        lease = block[:]
        weakref.finalize(lease, free.append, block).atexit = False
        return torch.from_numpy(lease)[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def _new(self, size: int) -> NDArray[np.uint8]:
        memory = np.empty(size + _CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % _CACHE_LINE
        self.blocks.append(memory[start : start + size])
        return self.blocks[-1]
