"""Records operations of the CPU library, to run them again as one call that all threads go through together.

One call of the library for all of a model's layers, instead of one for each operation, spares what lies between them:
Python, the wait for the interpreter lock, and the threads' falling asleep and waking.
"""

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.backends import fastest_for, recording_with
from kernels.cpu.arguments import check_status
from kernels.cpu.bindings import CpuKernels
from kernels.cpu.library import RECORDED_OPERATION, RUN_ARGS, Library, Operation, OperationKind

_CACHE_LINE = 64


class NotRecordableError(Exception):
    """Something ran that is not one of the library's operations over lines of tokens. The message says what."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One operation: its packed arguments, and how many lines of it a token makes."""

    kind: OperationKind
    arguments: bytes
    lines_per_token: int


class Recording:
    """Operations to run one after the other.

    Args:
        held: what owns the memory that the calls name. It lives as long as the recording.
    """

    def __init__(self, library: Library, calls: Sequence[RecordedCall], held: object) -> None:
        self.calls = tuple(calls)
        self._library = library
        self._held = held
        self._arguments = [torch.frombuffer(bytearray(call.arguments), dtype=torch.uint8) for call in calls]
        packed = b"".join(
            RECORDED_OPERATION.pack(call.kind.number, arguments.data_ptr(), call.lines_per_token)
            for call, arguments in zip(calls, self._arguments, strict=True)
        )
        self._operations = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._num_operations = len(calls)

    def part(self, choose: Callable[[RecordedCall], bool]) -> "Recording":
        """The operations that are chosen, over the same tensors: to measure them."""
        return Recording(self._library, [call for call in self.calls if choose(call)], self._held)

    def run(self, num_tokens: int, num_rows: int) -> None:
        """Runs all of it for the first `num_tokens` lines and `num_rows` rows of the tensors that it was recorded with.

        Raises:
            IndexError: an index tensor names what is not there. Nothing was written.
        """
        arguments = RUN_ARGS.pack(
            self._operations.data_ptr(), self._num_operations, torch.get_num_threads(), num_tokens, num_rows
        )
        check_status(self._library.run(self._library.context, arguments))


def record(num_tokens: int, run: Callable[[], None]) -> Recording:
    """Records what `run` does on the CPU by `kernels.ops`. Nothing is computed yet, so tensors have any content.

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
    """Stands for the library while something is recorded: `kernels` notes down operations and runs none.

    What they return has the right shape and place, and nothing in it. To be used as a context, which sees to it that
    nothing else is computed meanwhile: views only.

    Args:
        num_tokens: the first dimension of the tensors that are recorded, the most that a run can have.
    """

    def __init__(self, library: Library, num_tokens: int) -> None:
        self._library = library
        self._num_tokens = num_tokens
        self._calls: list[RecordedCall] = []
        self._memory = _ReusedMemory()
        self._mode = _NothingButViews()
        self.kernels = CpuKernels(_NotingLibrary(library, self._note), self._memory.empty)

    def __enter__(self) -> "Recorder":
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)

    def recording(self, owner: object) -> Recording:
        """What was recorded. `owner` has all tensors that were not made meanwhile; it lives as long."""
        return Recording(self._library, self._calls, (self._memory.blocks, owner))

    def _note(self, kind: OperationKind, arguments: bytes) -> int:
        lines = kind.lines(arguments)
        if not lines or lines % self._num_tokens:
            raise NotRecordableError(
                f"{kind.name.lower()} over {lines} lines, which are not those of {self._num_tokens} tokens"
            )
        self._calls.append(RecordedCall(kind, arguments, lines // self._num_tokens))
        return 0


class _NotingLibrary:
    """The operations of `Library`, each noted down instead."""

    def __init__(self, library: Library, note: Callable[[OperationKind, bytes], int]) -> None:
        def noting(kind: OperationKind) -> Operation:
            return lambda _, arguments: note(kind, arguments)

        self.isa = library.isa
        self.context = library.context
        self.paged_attention = noting(OperationKind.PAGED_ATTENTION)
        self.rms_norm = noting(OperationKind.RMS_NORM)
        self.layer_norm = noting(OperationKind.LAYER_NORM)
        self.silu_and_mul = noting(OperationKind.SILU_AND_MUL)
        self.rotary = noting(OperationKind.ROTARY)
        self.quantize = noting(OperationKind.QUANTIZE)
        self.product = noting(OperationKind.PRODUCT)
        self.all_reduce = noting(OperationKind.ALL_REDUCE)
        self.all_gather = noting(OperationKind.ALL_GATHER)
        self.pack_weight = self.shorten_weight = _refuse_to_pack


def _refuse_to_pack(context: int, arguments: bytes) -> int:
    raise NotRecordableError("weights are packed")


class _NothingButViews(TorchDispatchMode):
    """Refuses all of torch's operations but those whose result is a view of what they were given."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler with the first operation, so as not to compile this: a second or two.
        return False

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        returns = func._schema.returns
        if not returns or any(each.alias_info is None or each.alias_info.is_write for each in returns):
            raise NotRecordableError(f"{func} is computed by torch")
        return func(*args, **(kwargs or {}))


class _ReusedMemory:
    """Makes tensors in memory that is taken again as soon as nothing refers to the tensor or a view of it."""

    def __init__(self) -> None:
        self.blocks: list[NDArray[np.uint8]] = []
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = -(-math.prod(shape) * dtype.itemsize // _CACHE_LINE) * _CACHE_LINE
        free = self._free[size]
        block = free.pop() if free else self._new(size)
        # The tensor keeps this view of the block alive, and its end gives the block back.
        lease = block[:]
        weakref.finalize(lease, free.append, block).atexit = False
        return torch.from_numpy(lease)[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)

    def _new(self, size: int) -> NDArray[np.uint8]:
        memory = np.empty(size + _CACHE_LINE, np.uint8)
        start = -memory.ctypes.data % _CACHE_LINE
        self.blocks.append(memory[start : start + size])
        return self.blocks[-1]
