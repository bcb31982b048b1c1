"""What systems hold that reserve: cases computed by hand. A pool of 16 slots, a model that takes 8 tokens."""

import pytest

from bench.orca import Occupancy, Reservation, simulate

# The first two run side by side for two steps, with 3 + 2 and then 4 + 3 tokens in the pool; then the first ends, and
# the third, which waited, is admitted.
_LENGTHS = [(3, 2), (2, 3), (3, 1)]


def _assert_slots(use: Occupancy, tokens: float, reserved: float, internal: float, external: float) -> None:
    shares = (use.tokens, use.reserved, use.internal, use.external)
    assert tuple(share * 16 for share in shares) == pytest.approx((tokens, reserved, internal, external))
    assert sum(shares) == pytest.approx(1)


def test_an_oracle_reserves_what_will_be_used() -> None:
    use = simulate(_LENGTHS, Reservation.ORACLE, num_slots=16, longest=8, warm_up=0)
    _assert_slots(use, tokens=6, reserved=4, internal=0, external=6)
    assert use.num_running == 2


def test_a_power_of_two_reserves_at_most_twice_the_output() -> None:
    use = simulate(_LENGTHS, Reservation.POW2, num_slots=16, longest=8, warm_up=0)
    _assert_slots(use, tokens=6, reserved=4, internal=1, external=5)


def test_the_maximum_reserves_the_whole_model_length() -> None:
    use = simulate(_LENGTHS, Reservation.MAX, num_slots=16, longest=8, warm_up=0)
    _assert_slots(use, tokens=6, reserved=4, internal=6, external=0)


@pytest.mark.parametrize(
    ("reservation", "slots"), [(Reservation.MAX, 2048), (Reservation.POW2, 10 + 32), (Reservation.ORACLE, 10 + 25)]
)
def test_slots_of_a_request_with_25_output_tokens(reservation: Reservation, slots: int) -> None:
    assert reservation.slots(10, 25, 2048) == slots


def test_no_reservation_exceeds_the_model() -> None:
    assert Reservation.POW2.slots(1000, 600, 1700) == 1700


def test_the_head_of_the_queue_is_not_passed_over() -> None:
    # The second does not fit beside the first; the third would, and must wait behind the second.
    use = simulate([(8, 4), (8, 4), (1, 1)], Reservation.ORACLE, num_slots=24, longest=16, warm_up=0)
    assert use.num_running == 1


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="32 slots never fits into a pool of 16"):
        simulate([(3, 2)], Reservation.MAX, num_slots=16, longest=32, warm_up=0)


def test_a_warm_up_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="warm-up of 5 requests"):
        simulate(_LENGTHS, Reservation.ORACLE, num_slots=16, longest=8, warm_up=5)
