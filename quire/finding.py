"""What `quire doctor` finds out about a part of a machine."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """OK; NOTE: it works, and could be better or is not needed everywhere; WRONG: it does not work."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one part; `advice` says what to do, empty where there is nothing to do."""

    part: str
    verdict: Verdict
    found: str
    advice: str = ""
