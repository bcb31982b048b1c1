"""How much the store of background responses keeps."""

from collections.abc import Iterator

import pytest

from gateway.api.responses.background_store import (
    CANCELLED,
    COMPLETED,
    IN_PROGRESS,
    QUEUED,
    Background,
    BackgroundStore,
    Piece,
)

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


def test_room_is_made_without_reading_requests_and_answers(store):
    plan = store._database.execute("EXPLAIN QUERY PLAN SELECT coalesce(sum(bytes), 0) FROM background").fetchall()
    assert "COVERING INDEX" in plan[0][3]
