"""Which shapes decode graphs have, and which one a batch gets."""

import pytest

from worker_svc.device.graph_shapes import LARGEST_BATCH, GraphShape, GraphShapes


def test_row_counts_go_by_eights_up_to_the_most_rows() -> None:
    assert GraphShapes.up_to(40, 100).row_counts == (1, 2, 4, 8, 16, 24, 32, 40)
    assert GraphShapes.up_to(10, 100).row_counts == (1, 2, 4, 8, 10)
    assert GraphShapes.up_to(3, 100).row_counts == (1, 2, 3)
    assert GraphShapes.up_to(1, 100).row_counts == (1,)


def test_no_graph_has_more_rows_than_pays() -> None:
    assert GraphShapes.up_to(65536, 100).row_counts[-1] == LARGEST_BATCH


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (1, (1,)),
        (1024, (1024,)),
        (1025, (1024, 1025)),
        (8192, (1024, 4096, 8192)),
        (131072, (1024, 4096, 16384, 65536, 131072)),
    ],
)
def test_lengths_grow_fourfold_up_to_the_longest_sequence(longest: int, expected: tuple[int, ...]) -> None:
    assert GraphShapes.up_to(8, longest).lengths == expected


def test_a_batch_gets_the_smallest_shape_that_holds_it() -> None:
    shapes = GraphShapes.up_to(20, 5000)
    for num_rows in range(1, 21):
        for length in (1, 1023, 1024, 1025, 4096, 4097, 5000):
            shape = shapes.fit(num_rows, length)
            assert shape is not None
            smaller = [s for s in shapes if s.num_rows >= num_rows and s.max_seq_len >= length]
            assert shape == min(smaller, key=lambda s: (s.num_rows, s.max_seq_len))
            assert shape.num_rows - num_rows < 8


def test_a_batch_beyond_all_shapes_gets_none() -> None:
    shapes = GraphShapes.up_to(1000, 50)
    assert shapes.fit(LARGEST_BATCH + 1, 5) is None
    assert shapes.fit(1, 51) is None


def test_all_shapes_are_there_once_the_largest_first() -> None:
    shapes = GraphShapes.up_to(9, 1500)
    listed = list(shapes)
    assert listed[0] == shapes.largest == GraphShape(9, 1500)
    assert len(listed) == len(set(listed)) == 5 * 2
