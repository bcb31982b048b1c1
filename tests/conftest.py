"""What every test gets. Helpers live in tests/support; fixtures live beside the tests that use them."""

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Set before torch is imported anywhere: test machines are small, and kernels of tiny models gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# gRPC's own log tells of every peer that goes away, in the middle of pytest's output.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Nothing in the tests may reach for a model or a tokenizer over the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_WITH_ALL_PROCESSES = ("tests/chaos/", "tests/e2e/")


class _ByFile(LoadScopeScheduling):
    """The tests of a file run in one process, so that what they share is made once. Those that start a whole server
    take turns: each of them has the threads of its worker bound to the machine's processors."""

    def _split_scope(self, nodeid: str) -> str:
        return "whole server" if nodeid.startswith(_WITH_ALL_PROCESSES) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """How tests are spread where they run side by side. (The groups of `--dist loadgroup` have no effect with
    pytest 9.2, which names tests in another way than pytest-xdist 3.8 expects.)"""
    return _ByFile(config, log)
