"""docs/operations.md names the reasons that there are."""

import re
from pathlib import Path

from tests.unit.docs.test_api_reasons import documented_reasons

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_reason_that_is_explained_is_one_that_is_given() -> None:
    section = TEXT.partition("## When something is wrong")[2].partition("| seen |")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert rows
    assert {reason for row in rows for reason in re.findall(r"`([A-Z_]+)`", row)} <= documented_reasons()
