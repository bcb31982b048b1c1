"""The stream to a scheduler: how it comes back. What it carries is tested with fake schedulers."""

import random

from gateway.replicas.link import Backoff


def test_backoff_doubles_up_to_a_quarter_of_a_second_and_starts_over():
    backoff = Backoff(random.Random(1))
    delays = [backoff.next_delay_s() for _ in range(12)]
    assert 0.005 <= delays[0] <= 0.01
    assert all(0.125 <= delay <= 0.25 for delay in delays[5:])
    backoff.reset()
    assert backoff.next_delay_s() <= 0.01
