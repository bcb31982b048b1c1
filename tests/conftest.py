"""What every test gets. Helpers live in tests/support; fixtures live beside the tests that use them."""

import os
from pathlib import Path

import pytest

# Set before torch is imported anywhere: test machines are small, and kernels of tiny models gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# gRPC's own log tells of every peer that goes away, in the middle of pytest's output.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Nothing in the tests may reach for a model or a tokenizer over the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_WITH_ALL_PROCESSES = ("chaos", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run side by side (`--dist loadgroup`), those that start a whole server take turns: each of them has
    the threads of its worker bound to the machine's processors."""
    folders = [Path(__file__).parent / name for name in _WITH_ALL_PROCESSES]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker(pytest.mark.xdist_group("whole server"))
