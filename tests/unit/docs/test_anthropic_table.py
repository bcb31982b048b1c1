"""docs/anthropic.md has every field of Anthropic's bodies: those that the gateway parses, refuses and ignores."""

import re
from pathlib import Path

from gateway.api.anthropic.read import MessageBody, ToolDefinition

DOCUMENT = Path(__file__).parents[3] / "docs" / "anthropic.md"


def fields_of(section: str) -> set[str]:
    """The fields in the first column of the table of a section."""
    (_, _, rest) = DOCUMENT.read_text().partition(f"# {section}\n")
    table = rest.partition("\n#")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def test_every_field_is_in_its_table():
    assert fields_of("Fields") == set(MessageBody.model_fields)
    assert fields_of("Tools") == set(ToolDefinition.model_fields)
    assert fields_of("Refused") == set(MessageBody.harmless)
    assert fields_of("Accepted without effect") == MessageBody.hints
