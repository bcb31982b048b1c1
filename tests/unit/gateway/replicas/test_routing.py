"""Choice of a replica: by cached blocks, by affinity, and never one that is much busier than others."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.cache_messages import CachedBlocks
from gateway.replicas.routing import (
    Candidate,
    Found,
    Router,
    RoutingPolicy,
    Stage,
    Work,
    affinity_key,
    loads_of,
    prompt_hashes,
)
from quire.messages.prefix_hashes import BlockHash, PrefixHash, short
from quire.messages.replica_role import ReplicaRole
from quire.rpc.errors import InvalidArgument
from quire.scheduler.v1 import scheduler_pb2


def key_of(*token_ids):
    return affinity_key(np.array(token_ids, np.int32), 16)


def test_prompts_that_share_their_first_blocks_share_a_key():
    prefix = list(range(64))
    assert key_of(*prefix, 1, 2, 3) == key_of(*prefix, 9, 9)
    assert key_of(*prefix) != key_of(*prefix[:-1], 99)


SIZE = 4


def make_prompt(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


def make_cached(*prompts: np.ndarray, tenant: str = "") -> CachedBlocks:
    cached = CachedBlocks()
    hashes = [content for prompt in prompts for content in prompt_hashes(prompt, tenant, SIZE)]
    cached.update(scheduler_pb2.CacheUpdate(cleared=True, stored=b"".join(map(short, hashes))))
    return cached


def choose(prompt: np.ndarray, /, **candidates: Candidate) -> str:
    return Router(RoutingPolicy.CACHE).choose(prompt, "", candidates).replica


STORY = make_prompt(*range(40))


def test_a_prompt_goes_where_most_of_it_is_cached():
    longer, shorter = Candidate(0, SIZE, make_cached(STORY[:20])), Candidate(0, SIZE, make_cached(STORY[:12]))
    nothing = Candidate(0, SIZE, CachedBlocks())
    assert choose(STORY, a=nothing, b=longer, c=shorter) == "b"
    assert choose(STORY, a=longer, b=nothing, c=shorter) == "a"
    # No block of another tenant is cached.
    candidates = {"a": nothing, "b": longer, "c": shorter}
    of_other = Router(RoutingPolicy.CACHE).choose(STORY, "t", candidates)
    assert of_other == Router(RoutingPolicy.AFFINITY).choose(STORY, "t", candidates)


def make_on_disk(pool: np.ndarray, disk: np.ndarray) -> CachedBlocks:
    cached = make_cached(pool)
    on_disk = b"".join(map(short, prompt_hashes(disk, "", SIZE)))
    cached.update(scheduler_pb2.CacheUpdate(disk_stored=on_disk))
    return cached


def test_blocks_on_disk_are_worth_less_than_those_in_the_pool_and_more_than_none():
    nothing, in_pool = Candidate(0, SIZE, CachedBlocks()), Candidate(0, SIZE, make_cached(STORY))
    on_disk = Candidate(0, SIZE, make_on_disk(STORY[:0], STORY))
    for names in ("abc", "cba", "bca"):
        first, second, third = names
        assert choose(STORY, **{first: nothing, second: on_disk, third: in_pool}) == third
        assert choose(STORY, **{first: nothing, second: on_disk, third: nothing}) == second
    # A small part in a pool is worth less than the whole on disk.
    assert choose(STORY, a=Candidate(0, SIZE, make_cached(STORY[:8])), b=on_disk) == "b"
    half = Candidate(0, SIZE, make_on_disk(STORY[:20], STORY))
    assert choose(STORY, a=on_disk, b=half) == "b"
    # Blocks on disk need not be computed, which decides whether a prompt is long.
    assert Router(RoutingPolicy.CACHE).choose(STORY, "", {"a": half}).num_new_tokens == 0
    # The cached part is gone.
    assert half.cached is not None
    half.cached.update(scheduler_pb2.CacheUpdate(cleared=True))
    assert choose(STORY, a=on_disk, b=half) == "a"


def test_the_next_best_replica_takes_what_the_best_has_no_room_for():
    best, next_best = make_cached(STORY), make_cached(STORY[:8])
    others = Candidate(2, SIZE, CachedBlocks())
    assert choose(STORY, a=Candidate(3, SIZE, best), b=Candidate(2, SIZE, next_best), c=others) == "a"
    assert choose(STORY, a=Candidate(9, SIZE, best), b=Candidate(2, SIZE, next_best), c=others) == "b"


def test_replicas_that_are_not_known_compete_by_affinity():
    unknown = {name: Candidate(0, SIZE) for name in "abc"}
    chosen = choose(STORY, **unknown)
    assert chosen == Router(RoutingPolicy.AFFINITY).choose(STORY, "", unknown).replica
    known = next(name for name in unknown if name != chosen)
    assert choose(STORY, **(unknown | {known: Candidate(0, SIZE, make_cached(STORY[:4]))})) == known
    # A replica that is known to have nothing ranks like an unknown one.
    assert choose(STORY, **(unknown | {known: Candidate(0, SIZE, CachedBlocks())})) == chosen


def test_what_all_have_does_not_hold_conversations_together():
    """All begin with the same system prompt, which both replicas have: their own beginnings decide."""
    system = make_prompt(*range(200))
    both = {name: Candidate(0, SIZE, make_cached(system)) for name in "ab"}
    talks = [np.concatenate((system, make_prompt(*([500 + n] * 24)))) for n in range(200)]
    counts = Counter(choose(talk, **both) for talk in talks)
    assert min(counts.values()) > 70
    # And prompts with equal continuations go to the same replica, before it has any part of them.
    tails = [make_prompt(*([n] * 4)) for n in range(20)]
    assert len({choose(np.concatenate((talks[0], tail)), **both) for tail in tails}) == 1


def test_a_prefix_that_several_have_stays_at_one():
    """Otherwise all of them would keep it, and evict others."""
    both = {name: Candidate(0, SIZE, make_cached(STORY)) for name in "ab"}
    tails = [make_prompt(*([500 + n] * 15)) for n in range(50)]
    assert len({choose(np.concatenate((STORY, tail)), **both) for tail in tails}) == 1


def test_round_robin_takes_turns_whatever_the_load():
    router = Router(RoutingPolicy.ROUND_ROBIN)
    candidates = {"a": Candidate(9, SIZE), "b": Candidate(0, SIZE)}
    assert [router.choose(STORY, "", candidates).replica for _ in range(4)] == ["a", "b", "a", "b"]


def test_of_a_part_the_last_block_that_is_told_counts():
    hashes = [PrefixHash(BlockHash(bytes(31) + bytes([end]))) for end in (1, 4, 3, 8, 1, 12, 2)]
    cached = CachedBlocks()
    cached.update(scheduler_pb2.CacheUpdate(stored=b"".join(short(hashes[index]) for index in (1, 3)), sampling_bits=2))
    assert cached.find(hashes) == Found(4)
    assert cached.find(hashes[:1]) == Found(0)
    # The next block is on disk.
    cached.update(scheduler_pb2.CacheUpdate(disk_stored=short(hashes[5]), sampling_bits=2))
    assert cached.find(hashes) == Found(6, 2)


@pytest.mark.parametrize("message", [{"stored": b"1234567"}, {"removed": b"123456789"}, {"sampling_bits": 9}])
def test_a_malformed_update_is_refused_by_name(message):
    cached = make_cached(STORY)
    with pytest.raises(InvalidArgument, match=rf"^cache\.{next(iter(message))} "):
        cached.update(scheduler_pb2.CacheUpdate(**message))
    assert cached.find(prompt_hashes(STORY, "", SIZE)) == Found(10)


@settings(deadline=None)
@given(
    loads=st.lists(st.integers(0, 500), min_size=1, max_size=6),
    cached=st.lists(st.integers(0, 10), min_size=6, max_size=6),
)
def test_no_replica_is_chosen_for_its_cache_that_is_much_busier_than_the_average(loads, cached):
    candidates = {
        f"r{number}": Candidate(load, SIZE, make_cached(STORY[: SIZE * blocks]))
        for number, (load, blocks) in enumerate(zip(loads, cached, strict=False))
    }
    chosen = candidates[choose(STORY, **candidates)]
    assert chosen.load <= 1.25 * (sum(loads) + 1) / len(loads)


def test_a_request_that_is_expected_to_be_long_counts_for_several_and_nobody_for_more_than_four():
    assert loads_of({"a": 3, "b": 5}, {}) == {"a": 3, "b": 5}
    # The mean of the hints is 100; a request without one counts as one.
    assert loads_of({"a": 3, "b": 5}, {"a": [150], "b": [50, 100]}) == {"a": 3.5, "b": 4.5}
    # Hints beyond the bounds gain a request nothing.
    assert loads_of({"a": 1, "b": 9}, {"a": [10**6], "b": [1] * 9}) == {"a": 4, "b": 9 * 0.25}


def make_work(*prompts: int, streams: int = 0) -> Work:
    work = Work()
    for handle, num_tokens in enumerate(prompts):
        work.add_prompt(handle, num_tokens)
    for handle in range(streams):
        work.add_stream(1000 + handle)
    return work


def role_for(
    prefill: Work, decode: Work, *, stage: Stage = Stage.PROMPT, is_long: bool = True, cached: str = ""
) -> ReplicaRole:
    """The role of the replica that is chosen of two, for a story of ten blocks; replica `cached` has the story."""
    candidates = {
        role.value: Candidate(0, SIZE, make_cached(STORY) if role.value == cached else CachedBlocks(), role, work)
        for role, work in ((ReplicaRole.PREFILL, prefill), (ReplicaRole.DECODE, decode))
    }
    router = Router(RoutingPolicy.CACHE, long_prompt=40 if is_long else 41)
    return ReplicaRole(router.choose(STORY, "", candidates, stage=stage).replica)


def test_long_prompts_go_to_prefill_until_its_queue_delays_more_than_the_streams_elsewhere():
    streams = make_work(streams=2)
    assert role_for(make_work(), make_work()) is ReplicaRole.PREFILL
    # 40 tokens delay two streams and themselves by 120.
    assert role_for(make_work(60, 20), streams) is ReplicaRole.PREFILL
    assert role_for(make_work(60, 21), streams) is ReplicaRole.DECODE
    assert role_for(make_work(1), make_work()) is ReplicaRole.DECODE
    # Streams that will leave are not delayed by the prompt.
    assert role_for(make_work(streams=9), streams) is ReplicaRole.PREFILL
    assert role_for(make_work(), streams, cached="decode") is ReplicaRole.DECODE


@pytest.mark.parametrize(("stage", "is_long"), [(Stage.STREAM, True), (Stage.PROMPT, False)])
def test_streams_and_short_prompts_go_to_prefill_only_while_it_has_no_prompts_and_fewer_streams(stage, is_long):
    def where(prefill: Work, decode: Work) -> ReplicaRole:
        return role_for(prefill, decode, stage=stage, is_long=is_long, cached="prefill")

    assert where(make_work(), make_work()) is ReplicaRole.DECODE
    assert where(make_work(), make_work(streams=1)) is ReplicaRole.PREFILL
    assert where(make_work(streams=1), make_work(streams=1)) is ReplicaRole.DECODE
    assert where(make_work(1), make_work(streams=9)) is ReplicaRole.DECODE
    # A request that cannot leave again goes there only if there is no other replica.
    assert role_for(make_work(), make_work(streams=9), stage=Stage.STAY) is ReplicaRole.DECODE
    alone = {"a": Candidate(0, SIZE, None, ReplicaRole.PREFILL)}
    assert Router(RoutingPolicy.AFFINITY).choose(STORY, "", alone, stage=Stage.STAY) == ("a", len(STORY))
