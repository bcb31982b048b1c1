"""Counters of replicas that come and go: none falls, and there are no more than there were replicas at once."""

from gateway.metrics import ReplicaRecords
from gateway.replicas.live import Arrivals


def counts(records: ReplicaRecords) -> list[int]:
    return [record.num_generated_tokens for record in records]


def add(records: ReplicaRecords, address: str, num_tokens: int) -> None:
    records.of(address).add_tokens(Arrivals(0.0, num_tokens))


def test_a_replica_that_comes_continues_the_counters_of_one_that_is_gone():
    records = ReplicaRecords()
    records.keep(["a", "b"])
    add(records, "a", 1)
    records.keep(["b"])
    # Its last request is counted when its client has it.
    add(records, "a", 1)
    assert counts(records) == [2, 0]
    records.keep(["b", "c"])
    add(records, "c", 5)
    assert counts(records) == [7, 0]
    assert records.places() == {"b": 1, "c": 0}


def test_places_do_not_grow_with_the_replicas_of_a_year():
    records = ReplicaRecords()
    for day in range(365):
        records.keep([f"{day}", f"{day + 1}"])
        add(records, f"{day}", 1)
        # Tokens of a replica that left long ago.
        add(records, f"{day - 9}", 1)
    assert sum(counts(records)) == 2 * 365
    assert len(counts(records)) <= 4
