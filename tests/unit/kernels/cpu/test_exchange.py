"""Sums and gathers over processes that share memory, on every instruction set."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from quire_kernels import exchange
from quire_kernels.backends import recording_with
from quire_kernels.cpu.library import SLOT_BYTES
from quire_kernels.exchange import SharedGroup, shared_bytes
from quire_kernels.recording import Recorder
from tests.support.cpu_kernels import (
    IMPLEMENTATION_PARAMS,
    ISAS,
    library_of,
    make_implementation,
    parametrize_pairwise,
)

T = TypeVar("T")
TIMEOUT_S = 60


def together(size: int, act: Callable[[SharedGroup], T]) -> list[T]:
    """The results of `act` on each rank of a new group; all ranks act at the same time."""
    memory = torch.zeros(shared_bytes(size), dtype=torch.uint8)
    with ThreadPoolExecutor(size) as pool:
        acts = [pool.submit(act, SharedGroup(rank, size, memory)) for rank in range(size)]
        return [each.result(TIMEOUT_S) for each in acts]


SIZES = (1, 2, 3, 5)


@pytest.fixture(params=IMPLEMENTATION_PARAMS[1:])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "implementation_for", lambda device: make_implementation(request.param))


def make_parts(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)]


def in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@parametrize_pairwise(
    "implementation,shape,dtype,size",
    ISAS,
    # One element, less than a vector, a decode, some lines, none, and more than a slot can hold.
    [(1,), (3, 5), (1, 768), (64, 776), (0, 8), (2, 3, 190_001)],
    [torch.float32, torch.bfloat16, torch.float16],
    SIZES,
)
@pytest.mark.usefixtures("implementation")
def test_all_ranks_get_the_sum_in_the_order_of_ranks(shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
    parts = make_parts(size, shape, dtype)
    expected = in_order(parts)
    for total in together(size, lambda group: exchange.all_reduce(parts[group.rank].clone(), group)):
        assert torch.equal(total, expected)


# Widths that divide evenly or not, ranks without a column, a line longer than a slot of int64, and many lines.
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 768), (1, 3 * SLOT_BYTES // 8), (900, 1023), (0, 4)])
@pytest.mark.parametrize("size", SIZES)
def test_columns_of_all_ranks_lie_side_by_side(shape: tuple[int, int], size: int) -> None:
    (lines, total), dtype = shape, torch.bfloat16 if size == 3 else torch.int64
    whole = torch.arange(lines * total).view(lines, total).to(dtype)
    width = -(-total // size)

    def gather(group: SharedGroup) -> torch.Tensor:
        part = whole[:, group.rank * width : (group.rank + 1) * width]
        return exchange.all_gather(part, group, total)

    for gathered in together(size, gather):
        assert torch.equal(gathered, whole)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_of_a_rank_wait_for_each_other_too(num_threads: int, size: int) -> None:
    """Many rounds of several stripes: a thread must not read what another thread still copies."""
    shape, rounds = (16, 1024), 200

    def act(group: SharedGroup) -> int:
        torch.set_num_threads(num_threads)  # of this thread
        parts = make_parts(size, shape, torch.float32)
        total, wrong = in_order(parts), 0
        for index in range(rounds):
            factor = float(2 ** (index % 8))  # exact
            x = parts[group.rank] * factor
            wrong += not torch.equal(exchange.all_reduce(x, group), total * factor)
            gathered = exchange.all_gather(x, group, shape[1] * size)
            wrong += not torch.equal(gathered, (total * factor).repeat(1, size))
        return wrong

    assert together(size, act) == [0] * size


def test_a_recording_sums_and_gathers_as_many_lines_as_a_run_has(isa: str) -> None:
    most, size = 6, 2
    inputs = make_parts(size, (most, 32), torch.bfloat16)

    def act(group: SharedGroup) -> list[torch.Tensor]:
        x = torch.empty(most, 32, dtype=torch.bfloat16)
        gathered: list[torch.Tensor] = []

        def run() -> None:
            gathered.append(exchange.all_gather(exchange.all_reduce(x, group), group, 64))

        recorder = Recorder(library_of(isa), most)
        with recorder, recording_with(recorder.kernels):
            run()
        recording = recorder.recording(run)
        seen = []
        for num_tokens in (most, 1, 3):
            x.copy_(inputs[group.rank])
            recording.run(num_tokens, 1)
            seen.append(gathered[0][:num_tokens].clone())
            assert torch.equal(x[num_tokens:], inputs[group.rank][num_tokens:])
        return seen

    total = in_order(inputs)
    for seen in together(size, act):
        for lines, num_tokens in zip(seen, (most, 1, 3), strict=True):
            assert torch.equal(lines, total[:num_tokens].repeat(1, 2))


def test_arguments_that_do_not_fit_are_refused() -> None:
    group = SharedGroup(0, 1, torch.zeros(exchange.shared_bytes(1), dtype=torch.uint8))
    with pytest.raises(ValueError, match="x is not contiguous"):
        exchange.all_reduce(torch.zeros(4, 4).t()[:2], group)
    with pytest.raises(ValueError, match=r"x has dtype torch\.int64"):
        exchange.all_reduce(torch.zeros(4, dtype=torch.int64), group)
    with pytest.raises(ValueError, match=r"x has shape \[1, 4\]; expected \[any, 5\]"):
        exchange.all_gather(torch.zeros(1, 4), group, 5)
    with pytest.raises(ValueError, match=r"memory has shape \[64\]"):
        exchange.all_reduce(torch.zeros(4), SharedGroup(0, 1, torch.zeros(64, dtype=torch.uint8)))
    for rank, size in ((-1, 2), (2, 2), (0, 65)):
        with pytest.raises(ValueError, match=f"rank is {rank} of {size}"):
            SharedGroup(rank, size, torch.zeros(0))
