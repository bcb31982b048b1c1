"""Findings of `quire doctor` about a part of a machine."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """OK; NOTE: it works, and could be better or is not needed everywhere; WRONG: it does not work."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of one part; `advice` says what to do, and is empty if there is nothing to do."""

    part: str
    verdict: Verdict
    found: str
    advice: str = ""
