"""Files that are not imported because the tier has no test in them."""

import re
from pathlib import Path

from tests.support.tiers import may_select

FIRST, SECOND = "not (extended or all_isas)", "extended or all_isas"
TESTS = Path(__file__).parents[2]


def test_a_file_is_imported_for_the_tiers_that_may_have_tests_in_it() -> None:
    for name, in_first, in_second in (
        ("chaos/test_kill_everything.py", False, True),  # all its tests are extended
        ("chaos/test_kill.py", True, True),  # some parameters are
        ("unit/tools/test_checks.py", True, False),
        ("unit/kernels/cpu/test_library.py", True, True),  # the conftest.py beside it has a fixture that marks
    ):
        path = TESTS / name
        assert (may_select(FIRST, path), may_select(SECOND, path)) == (in_first, in_second)
        assert all(may_select(each, path) for each in ("", "asyncio and extended", "extended or"))
    # No other helper gives markers of tiers.
    helpers = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and path.name != "conftest.py"]
    marking = [path.name for path in helpers if re.search(r"mark\.(extended|all_isas)", path.read_text())]
    assert sorted(marking) == ["cpu_kernels.py", "tiers.py"]
