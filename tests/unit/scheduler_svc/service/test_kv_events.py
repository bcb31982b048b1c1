"""A publisher of KV events, without sockets."""

import asyncio
from typing import Any

import pytest

from quire.messages.prefix_hashes import BlockHash, PrefixHash, in_group
from scheduler_svc.core.cache_log import CacheChanges, CachedTokens
from scheduler_svc.service import kv_events
from scheduler_svc.service.kv_events import KvEventPublisher
from scheduler_svc.settings import SchedulerSettings
from tests.support.core_driver import Driver, make_config, make_request
from tests.support.kv_subscriber import events_in


class FakeSocket:
    """Messages from subscribers, and sent messages."""

    def __init__(self) -> None:
        self.incoming: list[bytes] = []
        self.numbers: list[int] = []
        self.payloads: list[bytes] = []
        self._is_read = asyncio.Event()

    async def recv(self) -> bytes:
        if not self.incoming:
            self._is_read.set()
            await asyncio.get_running_loop().create_future()
        return self.incoming.pop(0)

    async def until_read(self, publisher: KvEventPublisher, *messages: bytes) -> None:
        """The publisher reads these messages, and acts on them."""
        self.incoming += messages
        self._is_read.clear()
        following = asyncio.create_task(publisher._follow_subscriptions())
        await self._is_read.wait()
        following.cancel()

    def send_multipart(self, frames: list[bytes]) -> None:
        self.numbers.append(int.from_bytes(frames[1], "big"))
        self.payloads.append(frames[2])


def number_of(name: BlockHash) -> int:
    return int.from_bytes(name[-8:], "big")


def make_publisher(**settings: Any) -> tuple[KvEventPublisher, Any]:
    socket: Any = FakeSocket()
    return KvEventPublisher(socket, SchedulerSettings(kv_events="ipc://x", **settings)), socket


def publish(publisher: KvEventPublisher, count: int, *, num_removed: int = 1) -> None:
    for _ in range(count):
        publisher.publish(CacheChanges(False, [BlockHash(bytes(32))] * num_removed, {}), make_config())


async def test_a_subscriber_gets_the_newest_batches_of_before() -> None:
    publisher, socket = make_publisher(kv_events_buffer=3)
    publish(publisher, 5)
    await socket.until_read(publisher, b"\x01")
    assert socket.numbers == [2, 3, 4]


async def test_large_batches_are_bounded_by_their_bytes(monkeypatch) -> None:
    monkeypatch.setattr(kv_events, "_MAX_BUFFER_BYTES", 1000)
    publisher, socket = make_publisher()
    publish(publisher, 100, num_removed=100)
    assert sum(len(payload) for _, payload in publisher._buffer) <= 1000
    await socket.until_read(publisher, b"\x01")
    assert socket.numbers[-1] == 99
    publish(publisher, 1, num_removed=5000)
    assert len(publisher._buffer) == 1
    assert socket.numbers[-1] == 100


async def test_blocks_in_host_memory_have_the_medium_cpu() -> None:
    name = [BlockHash(bytes([number]) * 32) for number in range(2)]
    publisher, socket = make_publisher(kv_events_disk=True)
    publisher.publish(CacheChanges(False, [], {}, host_stored=[name[0]], host_removed=[name[1]]), make_config())
    await socket.until_read(publisher, b"\x01")
    (payload,) = socket.payloads
    told = [(kind, fields["medium"], fields["block_hashes"]) for kind, fields in events_in(payload)]
    numbers = [[int.from_bytes(each[-8:], "big")] for each in name]
    assert told == [("BlockStored", "CPU", numbers[0]), ("BlockRemoved", "CPU", numbers[1])]


@pytest.mark.parametrize("format_", ["array", "map"])
async def test_blocks_on_disk_have_a_medium_of_their_own_and_only_where_that_is_asked_for(format_: str) -> None:
    name = [PrefixHash(BlockHash(bytes([number]) * 32)) for number in range(4)]
    number = [int.from_bytes(each[-8:], "big") for each in name]
    to_disk = CacheChanges(False, [], {}, [name[0]], [name[1]])
    both = CacheChanges(False, [name[2]], {name[3]: CachedTokens(name[0], [1, 2, 3, 4])}, [name[2]], [name[3]])
    told = {}
    for with_disk in (False, True):
        publisher, socket = make_publisher(kv_events_format=format_, kv_events_disk=with_disk)
        publisher.publish(to_disk, make_config())
        publisher.publish(both, make_config())
        await socket.until_read(publisher, b"\x01")
        assert socket.numbers == list(range(1 + with_disk))
        events = [event for payload in socket.payloads for event in events_in(payload)]
        told[with_disk] = [(kind[5:], fields["medium"], fields["block_hashes"]) for kind, fields in events]
    assert told[False] == [("Removed", "GPU", [number[2]]), ("Stored", "GPU", [number[3]])]
    # A block is on disk before it leaves the pool, for a router that forgets the tokens of a block that is nowhere.
    assert told[True] == [
        ("Stored", "STORAGE", [number[0]]),
        ("Removed", "STORAGE", [number[1]]),
        ("Stored", "STORAGE", [number[2]]),
        *told[False],
        ("Removed", "STORAGE", [number[3]]),
    ]


@pytest.mark.parametrize("format_", ["array", "map"])
async def test_blocks_of_groups_of_layers_are_chains_of_their_own_with_the_number_of_the_group(format_: str) -> None:
    publisher, socket = make_publisher(kv_events_format=format_)
    names = [PrefixHash(BlockHash(bytes([7 * number]) * 32)) for number in (1, 2)]
    tokens = ([1, 2, 3, 4], [5, 6, 7, 8])
    stored: dict[BlockHash, CachedTokens | None] = {
        in_group(name, group): CachedTokens(parent, each, group=group)
        for group in range(2)
        for name, parent, each in zip(names, (None, names[0]), tokens, strict=True)
    }
    config = make_config(windowed_groups=1, window=6)
    publisher.publish(CacheChanges(False, [in_group(names[0], 1)], stored), config)
    publisher.publish(CacheChanges(False, [], {names[1]: CachedTokens(names[0], tokens[1])}), make_config())
    await socket.until_read(publisher, b"\x01")
    (_, removed), *told = events_in(socket.payloads[0])
    assert removed == {"block_hashes": [number_of(in_group(names[0], 1))], "medium": "GPU"}
    numbers = [[number_of(in_group(name, group)) for name in names] for group in range(2)]
    assert [fields["block_hashes"] for _, fields in told] == numbers
    # A block that leaves is not taken for the block of the same tokens in another group.
    assert not set(numbers[0]) & set(numbers[1])
    assert [(fields["parent_block_hash"], fields["group_idx"]) for _, fields in told] == [(None, 0), (None, 1)]
    assert [fields["token_ids"] for _, fields in told] == [[*tokens[0], *tokens[1]]] * 2
    # A model with one group has the fields of before, and the parent is the one in the block's own group.
    ((_, event),) = events_in(socket.payloads[1])
    assert "group_idx" not in event
    publisher.publish(CacheChanges(False, [], {in_group(names[1], 1): CachedTokens(names[0], [], group=1)}), config)
    ((_, later),) = events_in(socket.payloads[2])
    assert later["parent_block_hash"] == numbers[1][0]


async def test_there_are_no_events_of_checkpoints_of_states() -> None:
    publisher, socket = make_publisher(kv_events_disk=True)
    driver = Driver(config := make_config(num_blocks=24, state_blocks=3))
    log, told = driver.scheduler.log_cache(), set[int]()
    for handle in range(6):
        driver.submit(make_request(handle, prompt=[handle] * 18, max_tokens=9))
        driver.run_until_idle()
        changes = log.take()
        assert changes is not None
        assert {tokens.group for tokens in changes.stored.values() if tokens} == {0, 1, 2, 3}
        publisher.publish(changes, config)
    await socket.until_read(publisher, b"\x01")
    for kind, fields in (event for payload in socket.payloads for event in events_in(payload)):
        if kind == "BlockStored":
            assert len(fields["token_ids"]) == 4 * len(fields["block_hashes"])
            told.update(fields["block_hashes"])
        elif kind == "BlockRemoved":
            assert told.issuperset(fields["block_hashes"])
            told.difference_update(fields["block_hashes"])
    names = driver.scheduler.batch.blocks.pool.sealed_hashes()
    assert told < set(map(number_of, names))
    assert told
    # A block that came without tokens, and turns out to be of a checkpoint.
    late, state = BlockHash(bytes(31) + b"x"), CachedTokens(None, [1] * 4, group=1)
    for tokens in (None, state):
        stored: dict[BlockHash, CachedTokens | None] = {late: tokens}
        publisher.publish(CacheChanges(False, [], stored, tier_stored=[late]), config)
    publisher.publish(CacheChanges(False, [late], {}), config)
    events = [(kind, fields["block_hashes"]) for payload in socket.payloads[-2:] for kind, fields in events_in(payload)]
    assert events == [("BlockStored", [number_of(late)])] * 2 + [("BlockRemoved", [number_of(late)])]


@pytest.mark.parametrize(
    ("address", "listens"),
    [
        ("tcp://*:1", True),
        ("tcp://[::]:1", True),
        ("tcp://0.0.0.0:1", True),
        ("ipc:///run/x", True),
        ("tcp://10.0.0.0:1", False),
        ("tcp://indexer:1", False),
    ],
)
def test_addresses_of_all_interfaces_listen(address: str, listens: bool) -> None:
    assert kv_events._is_local(address) is listens
