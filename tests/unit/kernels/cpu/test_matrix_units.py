"""Products by emulated matrix units: the order of sums, loads and stores, and the bits of a row."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.packed_weight import Coding, PackedWeight, Quantization
from tests.support.coded_weights import make_coded
from tests.support.cpu_kernels import ISAS, torch_threads
from tests.support.emulated_amx import EMULATED_AMX, Counts, counts_of_this_thread
from tests.unit.kernels.cpu.test_product import make_kernels, make_weight

pytestmark = [
    pytest.mark.all_isas,
    pytest.mark.skipif(EMULATED_AMX not in ISAS, reason="no compiler or no AVX-512 for the emulation"),
]

C, B = slice(0, 4), slice(6, 8)
"""Tiles of products."""


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return make_kernels(EMULATED_AMX)


def packed_as(quantization: Quantization) -> Callable[[CpuKernels], PackedWeight]:
    return lambda kernels: kernels.pack_weight(make_weight(83, 300), False, quantization)


def packed_coded(coding: Coding, quantization: Quantization) -> Callable[[CpuKernels], PackedWeight]:
    return lambda kernels: kernels.pack_coded(make_coded(coding, 83, 2), False, quantization)


WEIGHTS = {each.value: packed_as(each) for each in Quantization} | {
    f"{coding.value} {each.value}": packed_coded(coding, each)
    for coding in Coding
    for each in (Quantization.NONE, Quantization.INT8_DYNAMIC)
    if each is Quantization.NONE or coding not in (Coding.FP8, Coding.TABLE4)
}


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_bits_of_a_row_do_not_depend_on_the_number_of_rows(kernels: CpuKernels, weight: str) -> None:
    packed = WEIGHTS[weight](kernels)
    x = torch.randn(130, packed.in_features).bfloat16()
    alone = torch.cat([kernels.product(row, packed, None, "identity", torch.float32) for row in x.split(1)])
    for count in range(2, 131):
        together = kernels.product(x[-count:], packed, None, "identity", torch.float32)
        assert torch.equal(together, alone[-count:]), count


def test_products_are_added_in_the_documented_order(kernels: CpuKernels) -> None:
    x, weight = torch.randn(5, 70).bfloat16(), make_weight(40, 70)
    packed = kernels.pack_weight(weight, False, Quantization.NONE)
    actual = kernels.product(x, packed, None, "identity", torch.float32)

    def padded(numbers: torch.Tensor) -> np.ndarray:  # [., blocks, words, 2]
        return np.pad(numbers.double().numpy(), ((0, 0), (0, 26))).reshape(numbers.shape[0], 3, 16, 2)

    sums = np.zeros((5, 40), np.float32)
    for of_x, of_weight in zip(padded(x).swapaxes(0, 1), padded(weight).swapaxes(0, 1), strict=True):
        of_pairs = np.zeros((5, 40, 2), np.float32)
        for word in range(16):
            of_pairs = (of_pairs + of_x[:, None, word] * of_weight[None, :, word]).astype(np.float32)
        sums = sums + (of_pairs[..., 0] + of_pairs[..., 1])
    assert torch.equal(actual, torch.from_numpy(sums))


def test_subnormal_numbers_are_zero(kernels: CpuKernels) -> None:
    def product(x: float, weight: float) -> float:
        packed = kernels.pack_weight(torch.tensor([[weight]]).bfloat16(), False, Quantization.NONE)
        return kernels.product(torch.tensor([[x]]).bfloat16(), packed, None, "identity", torch.float32).item()

    assert product(2.0**-63, 2.0**-63) == 2.0**-126
    assert product(2.0**-63, 2.0**-64) == 0.0
    assert product(2.0**-127, 2.0**20) == 0.0


def count(kernels: CpuKernels, packed: PackedWeight, rows: int) -> Counts:
    x = torch.randn(rows, packed.in_features).bfloat16()
    counts = counts_of_this_thread()
    with torch_threads(1):
        before = Counts.from_buffer_copy(counts)
        kernels.product(x, packed, None, "identity", torch.bfloat16)
    for name, *_ in Counts._fields_[:-1]:
        of_tiles = getattr(before, name)
        of_tiles[:] = [after - was for after, was in zip(getattr(counts, name), of_tiles, strict=True)]
    return before


@pytest.mark.parametrize("quantization", Quantization)
@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 48, 50, 64])
def test_up_to_64_rows_load_each_tile_of_the_weight_once_and_store_each_tile_of_sums_once(
    kernels: CpuKernels, rows: int, quantization: Quantization
) -> None:
    blocks = 12 if quantization is Quantization.INT8_DYNAMIC else 24
    packed = kernels.pack_weight(make_weight(64, 768), False, quantization)
    counts, tiles_of_rows = count(kernels, packed, rows), 4 if rows > 32 else -(-rows // 16)
    assert sum(counts.loads[B]) == 2 * 2 * blocks
    assert sum(counts.loads[C]) == 0
    assert sum(counts.stores) == 2 * 2 * tiles_of_rows
    assert sum(counts.products) == 2 * 2 * blocks * tiles_of_rows
