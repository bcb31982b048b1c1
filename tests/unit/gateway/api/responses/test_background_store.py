"""How much the store of background responses keeps."""

from collections.abc import Iterator

import pytest

from gateway import sqlite
from gateway.api.responses.background_store import (
    CANCELLED,
    COMPLETED,
    FAILED,
    IN_PROGRESS,
    QUEUED,
    RUNNING,
    Background,
    BackgroundStore,
    Piece,
)
from quire.rpc.errors import ResourceExhausted

TENANT, EVENT = "a", b"data: {}\n\n"


@pytest.fixture
def store() -> Iterator[BackgroundStore]:
    made = BackgroundStore(None, "this", 10_000)
    yield made
    made.close()


def add(store: BackgroundStore, response_id: str) -> None:
    store.add(Background(TENANT, response_id, "", b"{}", 0, QUEUED, b"{}"))


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_the_last_state_of_a_response_counts(store, is_cancelled):
    large = b"x" * 6_000
    for response_id in ("first", "second"):
        add(store, response_id)
        if is_cancelled:
            assert store.end(TENANT, response_id, CANCELLED, lambda events, number: (large, EVENT))
        else:
            store.write(TENANT, response_id, Piece(0, 1, EVENT), IN_PROGRESS)
            store.write(TENANT, response_id, Piece(1, 1, EVENT), COMPLETED, large)
    assert store.get(TENANT, "first") is None
    assert store.get(TENANT, "second") is not None


def test_a_gateway_fails_no_response_that_another_one_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "LEASE_S", -1.0)
    this, other = (BackgroundStore(tmp_path / "store", name, 10_000) for name in ("this", "other"))
    add(this, "first")
    assert [row.id for row in other.take(1)] == ["first"]
    assert not this.end(TENANT, "first", FAILED, lambda events, number: (b"{}", EVENT), this.owner)
    assert other.end(TENANT, "first", FAILED, lambda events, number: (b"{}", EVENT), other.owner)
    for each in (this, other):
        each.close()


def test_responses_that_run_leave_room_for_those_that_ended_and_for_other_tenants(store):
    add(store, "ended")
    store.write(TENANT, "ended", Piece(0, 1, EVENT), COMPLETED, b"x" * 3_000)
    request = b"x" * 2_000

    def run(tenant: str, response_id: str) -> None:
        store.add(Background(tenant, response_id, "", request, 0, QUEUED, b"{}"))

    run(TENANT, "first")
    with pytest.raises(ResourceExhausted, match="exceed half of --max-stored-response-bytes") as refused:
        run(TENANT, "second")
    assert refused.value.reason == "BACKGROUND_LIMIT"
    # Its first one, even if others take much.
    run("b", "other")
    with pytest.raises(ResourceExhausted):
        run("b", "another")
    assert store.get(TENANT, "ended") is not None
    store.write(TENANT, "first", Piece(0, 0, b""), COMPLETED)
    run(TENANT, "second")


def test_room_is_made_without_reading_requests_and_answers(store):
    plan = store.rows("EXPLAIN QUERY PLAN SELECT coalesce(sum(bytes), 0) FROM background")
    assert "COVERING INDEX" in plan[0][3]
    of_tenants = f"SELECT tenant, count(*), sum(bytes) FROM background WHERE status IN {RUNNING} GROUP BY tenant"
    assert "COVERING INDEX" in store.rows(f"EXPLAIN QUERY PLAN {of_tenants}")[0][3]
