"""Low-rank addends of products equal float64 results, for all shapes; a token's bits do not depend on the others."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels import ops
from quire_kernels.cpu.low_rank import PackedTable, TokenAddends
from quire_kernels.low_rank import LowRank, MaskedTable
from quire_kernels.packed_weight import Coding, Quantization
from tests.support.coded_weights import make_coded
from tests.support.cpu_kernels import torch_threads
from tests.unit.kernels.cpu.test_product import exact, make_kernels, make_weight

NUM_SLOTS, MAX_RANK = 3, 40
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_parts(
    in_features: int, widths: Sequence[int], ranks: Sequence[int | None], dtype: torch.dtype
) -> list[LowRank | None]:
    return [
        None
        if rank is None
        else LowRank(make_weight(rank, in_features, dtype), make_weight(width, rank, dtype), 0.5 + width % 3)
        for width, rank in zip(widths, ranks, strict=True)
    ]


def delta_of(x: torch.Tensor, parts: Sequence[LowRank | None], widths: Sequence[int]) -> torch.Tensor:
    """[T, out] float64"""
    found = [
        torch.zeros(x.shape[0], width, dtype=torch.float64)
        if part is None
        else part.scale * exact(exact(x, part.a, None), part.b, None)
        for part, width in zip(parts, widths, strict=True)
    ]
    return torch.cat(found, dim=-1)


def expected_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    adapters: Sequence[Sequence[LowRank | None]],
    widths: Sequence[int],
    slots: torch.Tensor,
) -> torch.Tensor:
    total = exact(x, weight, None)
    for slot, parts in enumerate(adapters, 1):
        total += torch.where((slots == slot)[:, None], delta_of(x, parts, widths), 0.0)
    return total


RANKS = st.one_of(st.none(), st.integers(1, MAX_RANK), st.sampled_from([4, 8, 16]))


@given(
    num_tokens=st.integers(1, 40),
    widths=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    in_features=st.one_of(st.integers(1, 130), st.sampled_from([256, 768])),
    gated=st.booleans(),
    quantization=st.sampled_from(list(Quantization)),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 2),
    data=st.data(),
)
def test_any_shape_equals_the_sums_of_float64(
    isa, num_tokens, widths, in_features, gated, quantization, dtype, threads, data
) -> None:
    kernels = make_kernels(isa)
    if not kernels.has_products(dtype, quantization):
        return
    if sum(widths) % 2 and gated:
        widths[0] += 1
    x, weight = torch.randn(num_tokens, in_features).to(dtype), make_weight(sum(widths), in_features, dtype)
    adapters = [make_parts(in_features, widths, [data.draw(RANKS) for _ in widths], dtype) for _ in range(NUM_SLOTS)]
    slots = torch.tensor(data.draw(st.lists(st.integers(0, NUM_SLOTS), min_size=num_tokens, max_size=num_tokens)))
    activation = "silu" if gated else "identity"
    with torch_threads(threads):
        packed = kernels.pack_weight(weight, gated, quantization)
        table = PackedTable([packed], widths, NUM_SLOTS, MAX_RANK)
        for slot, parts in enumerate(adapters, 1):
            table.put(slot, table.pack(parts))
        actual = kernels.product(x, packed, None, activation, torch.float32, TokenAddends(table, slots))
        plain = kernels.product(x, packed, None, activation, torch.float32)
    assert torch.equal(actual[slots == 0], plain[slots == 0])
    if quantization is not Quantization.NONE:
        return  # Other tests cover these products, and other cases of this test cover the addends.
    expected = expected_of(x, weight, adapters, widths, slots)
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def test_addends_come_on_top_of_rounded_products(isa: str) -> None:
    kernels, x, weight = make_kernels(isa), torch.randn(9, 200), make_weight(75, 200, torch.float32)
    parts = make_parts(200, [75], [12], torch.float32)
    for quantization in (Quantization.INT8_WEIGHT_ONLY, Quantization.INT8_DYNAMIC):
        packed = kernels.pack_weight(weight, False, quantization)
        table = PackedTable([packed], [75], 1, 12)
        table.put(1, table.pack(parts))
        with_addends = kernels.product(
            x, packed, None, "identity", torch.float32, TokenAddends(table, torch.ones(9, dtype=torch.int64))
        )
        plain = kernels.product(x, packed, None, "identity", torch.float32)
        delta = delta_of(x, parts, [75])
        torch.testing.assert_close(with_addends.double() - plain.double(), delta, rtol=1e-4, atol=1e-4)


def test_weights_of_several_codings_are_one_layer(isa: str) -> None:
    """Parts begin and end within weights, and within their tiles."""
    kernels, widths, x = make_kernels(isa), [70, 10, 61], torch.randn(7, 512).bfloat16()
    packed = [
        kernels.pack_coded(make_coded(coding, out, 512 // coding.group[0]), False, Quantization.NONE)
        for coding, out in ((Coding.Q4_K, 75), (Coding.Q6_K, 40), (Coding.Q8_0, 26))
    ]
    parts, slots = make_parts(512, widths, [8, 12, 5], torch.bfloat16), torch.tensor([1, 0, 2, 1, 0, 1, 1])
    table = PackedTable(packed, widths, 2, MAX_RANK)
    table.put(1, table.pack(parts))
    plain = kernels.products(x, packed, None, torch.float32)
    actual = kernels.products(x, packed, None, torch.float32, TokenAddends(table, slots))
    adapted = slots == 1
    assert torch.equal(actual[~adapted], plain[~adapted])
    found = (actual - plain)[adapted].double()
    torch.testing.assert_close(found, delta_of(x[adapted], parts, widths), rtol=5e-2, atol=5e-2)


def test_a_tokens_bits_do_not_depend_on_other_tokens(isa: str) -> None:
    kernels, widths = make_kernels(isa), [96, 40, 40]
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(67, 768).to(dtype), make_weight(176, 768, dtype)
        for gated, activation in ((False, "identity"), (True, "silu")):
            packed = kernels.pack_weight(weight, gated, Quantization.NONE)
            table = PackedTable([packed], widths, NUM_SLOTS, MAX_RANK)
            for slot in (1, 2, 3):
                ranks = [16, None if slot == 2 else 7, 4 * slot]
                table.put(slot, table.pack(make_parts(768, widths, ranks, dtype)))
            slots = torch.arange(67) % 4
            with torch_threads(2):
                addends = TokenAddends(table, slots.repeat(8))
                together = kernels.product(x.repeat(8, 1), packed, None, activation, dtype, addends)
            assert torch.equal(together, together[:67].repeat(8, 1))
            for token in range(67):
                one = slice(token, token + 1)
                alone = kernels.product(x[one], packed, None, activation, dtype, TokenAddends(table, slots[one]))
                assert torch.equal(alone, together[one])


def test_a_slot_is_replaced_and_emptied(isa: str) -> None:
    kernels, x, weight = make_kernels(isa), torch.randn(4, 64), make_weight(32, 64, torch.float32)
    packed = kernels.pack_weight(weight, False, Quantization.NONE)
    table, slots = PackedTable([packed], [32], 2, 8), torch.tensor([2, 0, 2, 1])

    def product() -> torch.Tensor:
        return kernels.product(x, packed, None, "identity", torch.float32, TokenAddends(table, slots))

    plain = product()
    assert torch.equal(plain, kernels.product(x, packed, None, "identity", torch.float32))
    for seed in (1, 2):
        torch.manual_seed(seed)
        parts = make_parts(64, [32], [8], torch.float32)
        table.put(2, table.pack(parts))
        found = (product() - plain)[0].double()
        torch.testing.assert_close(found, delta_of(x[:1], parts, [32])[0], rtol=1e-4, atol=1e-4)
    table.put(2, None)
    assert torch.equal(product(), plain)


def test_a_slot_that_is_not_there_is_refused(isa: str) -> None:
    kernels, x = make_kernels(isa), torch.randn(2, 64)
    packed = kernels.pack_weight(make_weight(32, 64, torch.float32), False, Quantization.NONE)
    table = PackedTable([packed], [32], 2, 8)
    for slot in (-1, 3):
        with pytest.raises(IndexError, match="slots"):
            kernels.product(x, packed, None, "identity", torch.float32, TokenAddends(table, torch.tensor([0, slot])))


def test_slots_must_be_those_of_the_tokens() -> None:
    weight = make_weight(32, 64, torch.float32)
    packed = ops.pack_weight(weight)
    addends = TokenAddends(PackedTable([packed], [32], 1, 8), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="slots"):
        ops.product(torch.randn(2, 64), packed, addends=addends)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torchs_table_adds_the_same_and_leaves_the_others_alone(dtype: torch.dtype) -> None:
    widths, x = [30, 12], torch.randn(5, 50).to(dtype)
    table = MaskedTable(50, widths, NUM_SLOTS, MAX_RANK, like=x.new_empty(0))
    adapters = [make_parts(50, widths, [9, None if slot == 2 else MAX_RANK], dtype) for slot in (1, 2, 3)]
    for slot, parts in enumerate(adapters, 1):
        table.put(slot, table.pack(parts))
    slots, weight = torch.tensor([1, 0, 3, 2, 1]), make_weight(42, 50, dtype)
    product = torch.nn.functional.linear(x, weight)
    actual = table.add(product, x, slots)
    assert torch.equal(actual[1], product[1])
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}[dtype]
    expected = expected_of(x, weight, adapters, widths, slots)
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    table.put(1, None)
    assert torch.equal(table.add(product, x, slots)[0], product[0])


def test_torchs_table_of_a_rank_without_inputs_adds_nothing() -> None:
    """The last of many ranks has no inputs if a layer has too few for each."""
    table = MaskedTable(0, [12], NUM_SLOTS, MAX_RANK, like=torch.empty(0))
    table.put(1, table.pack([LowRank(torch.empty(9, 0), torch.randn(12, 9), 0.5)]))
    product = torch.randn(3, 12)
    assert torch.equal(table.add(product, torch.empty(3, 0), torch.tensor([1, 0, 1])), product)
