"""Fixtures for pytest: `pytest_plugins = ["quire.testing.plugin"]` in a conftest.py, or `-p quire.testing.plugin`.

It is not loaded by itself: a plugin that an installed package registers is loaded by every pytest of the environment,
also where no test wants it.
"""

from collections.abc import Iterator

import pytest

from quire.testing.server import EmbeddedServer, ScriptedServer


@pytest.fixture(scope="session")
def quire_scripted_flags() -> list[str]:
    """Flags of `quire scripted`; a test suite may override it."""
    return []


@pytest.fixture(scope="session")
def quire_scripted_process(quire_scripted_flags: list[str]) -> Iterator[ScriptedServer]:
    """One scripted server for all tests."""
    with ScriptedServer(*quire_scripted_flags) as server:
        yield server


@pytest.fixture
def quire_scripted(quire_scripted_process: ScriptedServer) -> Iterator[ScriptedServer]:
    """A scripted server without rules and records. The report of a test that fails shows the requests that came."""
    quire_scripted_process.check_alive()
    quire_scripted_process.reset()
    yield quire_scripted_process
    for each in quire_scripted_process.requests():
        print(f"{each.path} {each.status}, rule {each.rule}: {each.messages[-1].text[-200:] if each.messages else ''}")


@pytest.fixture(scope="session")
def quire_embedded_flags() -> list[str]:
    """Flags of `quire serve`; a test suite may override it."""
    return []


@pytest.fixture(scope="session")
def quire_embedded_process(quire_embedded_flags: list[str]) -> Iterator[EmbeddedServer]:
    """One server with the embedded model for all tests."""
    with EmbeddedServer(*quire_embedded_flags) as server:
        yield server


@pytest.fixture
def quire_embedded(quire_embedded_process: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server with the embedded model that serves, also after a test that killed a service, without orders at
    failpoints."""
    quire_embedded_process.wait_ready()
    yield quire_embedded_process
    quire_embedded_process.clear()
