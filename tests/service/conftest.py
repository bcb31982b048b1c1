"""Processes that compile constraints, and that render callers' templates, are forks of a process that has imported."""

from collections.abc import Iterator

import pytest

from gateway.request import constraint_checker
from gateway.text import request_template
from tests.support.forks import TRIALS, forked


@pytest.fixture(scope="module", autouse=True)
def _trials_are_forks() -> Iterator[None]:
    """The start of such a process takes half a second of processor time, most of it imports, and each gateway that gets
    a constraint starts one. Tests of other folders, which may run in the same process, start real ones."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (constraint_checker, request_template):
            patch.setattr(module, "command_of", lambda name: forked(name, *TRIALS))
        yield
