"""Files that are not imported because they have no test of the tier."""

import re
from pathlib import Path

from tests.support.tiers import may_select

FIRST, SECOND = "not (extended or all_isas or real or long)", "(extended or all_isas) and not long"
REAL, LONG = "real", "long"
TESTS = Path(__file__).parents[2]


def test_a_file_is_imported_for_the_tiers_that_may_have_tests_in_it(tmp_path: Path) -> None:
    texts = {
        "all.py": ("pytestmark = pytest.mark.extended\n", False, True, True, True),
        "some.py": ("@pytest.mark.extended\ndef test_it(): ...\n", True, True, True, True),
        "none.py": ("def test_it(): ...\n", True, False, False, False),
        "real.py": ("pytestmark = pytest.mark.real\n", False, True, True, False),
        "long.py": ("pytestmark = pytest.mark.long\n", False, False, False, True),
        # The conftest.py in its folder has a fixture that gives parameters markers.
        "kernels/none.py": ("def test_it(kernels): ...\n", True, True, True, True),
    }
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "conftest.py").write_text("from tests.support.cpu_kernels import each\n")
    for name, (text, *expected) in texts.items():
        (path := tmp_path / name).write_text(text)
        assert [may_select(tier, path) for tier in (FIRST, SECOND, REAL, LONG)] == expected
        assert all(may_select(each, path) for each in ("", "asyncio and extended", "extended or"))
    # No other helper marks tests with tiers.
    helpers = [path for path in TESTS.rglob("*.py") if not path.name.startswith("test_") and path.name != "conftest.py"]
    marking = [path.name for path in helpers if re.search(r"mark\.(extended|all_isas|long)", path.read_text())]
    assert sorted(marking) == ["cpu_kernels.py", "tiers.py"]
