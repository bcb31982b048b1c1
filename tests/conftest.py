"""Fixtures and hooks for every test. Helpers live in tests/support; fixtures live next to the tests that use them."""

import gc
import logging
import os
import signal
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests.support.forks import forked_pytest, share_forks
from tests.support.tiers import may_select

# A shell starts its background jobs with SIGINT ignored, nohup whatever it runs with SIGHUP, and programs inherit that;
# tests send both to programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Set before torch is imported anywhere: test machines are small, and kernels of tiny models gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Same as in a worker. In a test with two threads, one would spin while the other has no processor: a third of the
# processor time of the tests of CPU kernels.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# gRPC's own log would report every lost peer in the middle of pytest's output.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# No test may fetch a model or a tokenizer over the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Loading the system's certificate authorities takes 30 ms for each HTTP client, and the tests trust none of them.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = os.devnull

# The gate has no random seed: every run gets the same examples.
settings.register_profile("gate", derandomize=True, database=None, deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("QUIRE_TEST_PROFILE", "gate"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imported and collected objects live to the end, so the garbage collector need not visit them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """What libraries log goes to the root's handlers. Pytest would give its own to each logger that passes nothing on,
    before each phase of each test: torch has 39 of them, which took a fifth of the time of a short test."""
    for logger in logging.Logger.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_configure(config: pytest.Config) -> None:
    """The processes of pytest-xdist, and the services that tests start, are forks of processes that imported once.
    With `--cov` they are not: coverage is measured from the start of a process."""
    if hasattr(config, "workerinput"):
        _report_less(config)
    starts_others = config.getvalue("dist") == "loadfile" and not hasattr(config, "workerinput")
    if starts_others and not config.pluginmanager.has_plugin("_cov"):
        share_forks()
        command = forked_pytest("-m", config.option.markexpr, *config.args)
        config.option.tx = [f"popen//python={command}"] * len(config.option.tx)


def _report_less(config: pytest.Config) -> None:
    """Processes of pytest-xdist send six messages for each test. The first process needs the result of the call,
    failures, and the end; the others took 1.4 ms of processor time for each test."""
    interactor: Any = next(each for each in config.pluginmanager.get_plugins() if hasattr(each, "sendevent"))
    send = interactor.sendevent

    def send_news(name: str, **fields: Any) -> None:
        is_step = name == "testreport" and fields["data"]["when"] != "call" and fields["data"]["outcome"] == "passed"
        if name not in ("logstart", "logfinish") and not is_step:
            send(name, **fields)

    interactor.sendevent = send_news


_IN_PARTS = (
    *("test_worlds.py::", "test_moves.py::", "test_known_faults.py::test_a_world"),
    *("gateway/test_sweep.py::", "test_compilation.py::"),
    *("real/test_families.py::", "real/test_templates.py::", "real/test_tokenizers.py::"),
)


class _InParts(LoadFileScheduling):
    """Distributes file by file, but splits files of few long tests, which would keep one process busy at the end."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if any(name in nodeid for name in _IN_PARTS) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Chooses how processes share the tests."""
    return _InParts(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without tests of the selected tier."""
    if collection_path.match("test_*.py") and not may_select(config.option.markexpr, collection_path):
        return True
    return None


@pytest_asyncio.fixture(scope="session", loop_scope="session", autouse=True)
async def _collected_while_the_loop_runs() -> AsyncIterator[None]:
    """A server of grpc.aio schedules its shutdown when it is collected, which a closed loop cannot run."""
    yield
    gc.collect()
