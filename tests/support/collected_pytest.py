"""Forks of a process in which pytest has collected: all files of tests are imported, with their asserts rewritten.

`python -m tests.support.collected_pytest DESCRIPTOR ARGUMENT...` serves a socket as tests.support.forked_services does.
Imports are three quarters of a collection, which each process of pytest-xdist makes.
"""

import contextlib
import io
import sys

import pytest

from tests.support.forked_services import fork_after


def _collect(*arguments: str) -> None:
    """Errors appear in each fork, which imports again what could not be imported."""
    with contextlib.redirect_stdout(io.StringIO()):
        # Files that are imported may keep sys.stderr, which a capture would close.
        pytest.main(["--collect-only", "--quiet", "--capture=no", "-p", "no:cacheprovider", *arguments])


if __name__ == "__main__":
    fork_after(lambda: _collect(*sys.argv[2:]), sys.argv[1])
