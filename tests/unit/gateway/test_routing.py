"""Requests with a common prefix meet on one replica, and no replica is overloaded by that."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.pool import affinity_key, choose_replica

REPLICAS = ["a:1", "b:1", "c:1", "d:1"]


def key_of(*token_ids):
    return affinity_key(np.array(token_ids, np.int32), 16)


def idle(replicas=REPLICAS):
    return dict.fromkeys(replicas, 0)


def test_prompts_that_share_their_first_blocks_share_a_key():
    prefix = list(range(64))
    assert key_of(*prefix, 1, 2, 3) == key_of(*prefix, 9, 9)
    assert key_of(*prefix) != key_of(*prefix[:-1], 99)


def test_a_tail_beyond_whole_blocks_does_not_count():
    assert key_of(*range(16), 5) == key_of(*range(16), 6)
    assert key_of(1, 2) != key_of(1, 3)


def test_idle_replicas_are_used_evenly():
    counts = Counter(choose_replica(key_of(number), idle()) for number in range(2000))
    assert set(counts) == set(REPLICAS)
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_only_keys_of_a_lost_replica_move():
    for number in range(300):
        before = choose_replica(key_of(number), idle())
        after = choose_replica(key_of(number), idle(REPLICAS[:3]))
        assert after == before or before == REPLICAS[3]


def test_order_of_replicas_does_not_matter():
    key = key_of(1, 2, 3)
    assert choose_replica(key, idle()) == choose_replica(key, idle(REPLICAS[::-1]))


@settings(deadline=None)
@given(loads=st.lists(st.integers(0, 500), min_size=1, max_size=6), token=st.integers(0, 1000))
def test_the_chosen_replica_is_never_much_busier_than_the_average(loads, token):
    by_replica = {f"r{number}": load for number, load in enumerate(loads)}
    chosen = choose_replica(key_of(token), by_replica)
    assert by_replica[chosen] <= 1.25 * (sum(loads) + 1) / len(loads)


def test_one_hot_prefix_spills_over():
    loads = idle()
    for _ in range(100):
        loads[choose_replica(key_of(7), loads)] += 1
    assert max(loads.values()) <= 33
    assert sum(load > 0 for load in loads.values()) == 4
