import numpy as np
import pytest

from worker_svc.sampling.philox import philox4x32, uniform

# Random123's known answers for philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def make_array(values: list[list[int]]) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, output: str) -> None:
    assert philox4x32(make_array([words(counter)]), make_array([words(key)])).tolist() == [words(output)]


def test_rows_do_not_depend_on_each_other() -> None:
    counters = make_array([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = make_array([words(key) for _, key, _ in KNOWN_ANSWERS])
    assert philox4x32(counters, keys).tolist() == [words(output) for _, _, output in KNOWN_ANSWERS]


def test_uniform_takes_the_seed_as_key_and_the_position_as_counter() -> None:
    seed = 0x299F31D0A4093822
    (first, second, *_) = philox4x32(make_array([[17, 0, 0, 0]]), make_array([[0xA4093822, 0x299F31D0]]))[0].tolist()
    expected = ((first >> 5) * 2**26 + (second >> 6)) / 2**53
    assert uniform(np.array([seed], dtype=np.uint64), np.array([17])).tolist() == [expected]


def test_uniform_is_uniform_over_positions_and_over_seeds() -> None:
    count = 20_000
    one_seed = uniform(np.full(count, 3, dtype=np.uint64), np.arange(count))
    one_position = uniform(np.arange(count, dtype=np.uint64), np.full(count, 3))
    for numbers in (one_seed, one_position):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        # 99 degrees of freedom: beyond 160 once in ten thousand.
        assert ((counts - count / 100) ** 2 / (count / 100)).sum() < 160
    assert abs(np.corrcoef(one_seed[:-1], one_seed[1:])[0, 1]) < 0.03
