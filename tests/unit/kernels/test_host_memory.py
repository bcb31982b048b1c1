"""Memory of weights is contiguous, and is freed with the last of them."""

import torch

from quire_kernels.host_memory import SharedPages


def test_tensors_lie_side_by_side_and_apart() -> None:
    pages = SharedPages()
    first = pages.empty((3, 11), torch.int8).fill_(1)
    second = pages.empty((5,), torch.float32).fill_(2)
    assert second.data_ptr() - first.data_ptr() == 64
    assert (first == 1).all()
    assert (second == 2).all()


def test_memory_is_that_of_the_tensors_in_it() -> None:
    pages = SharedPages()
    first, second = (pages.empty((1 << 20,), torch.uint8) for _ in range(2))
    memory = pages._memory
    del first
    assert memory() is not None
    del second
    assert memory() is None
    assert pages.empty((8,), torch.uint8).fill_(3).sum() == 24


def test_what_is_cut_from_the_last_tensor_goes_to_the_next() -> None:
    pages = SharedPages()
    first, second = (pages.empty((256,), torch.uint8) for _ in range(2))
    kept = pages.cut(first, 64), pages.cut(second, 100)
    third = pages.empty((1,), torch.uint8)
    assert [len(each) for each in kept] == [64, 100]
    assert third.data_ptr() - first.data_ptr() == 256 + 128


def test_tensors_that_do_not_fit_have_memory_of_their_own() -> None:
    pages = SharedPages()
    small, large = pages.empty((64,), torch.uint8), pages.empty((40 << 20,), torch.uint8)
    assert pages.cut(large, 10).shape == (10,)
    assert pages.empty((64,), torch.uint8).data_ptr() - small.data_ptr() == 64
