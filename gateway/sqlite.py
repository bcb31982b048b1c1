"""Transactions of the gateway's stores in SQLite."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def changing(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """A transaction, which no other gateway's interrupts."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")
