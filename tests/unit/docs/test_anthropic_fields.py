"""docs/anthropic.md has every field of Anthropic's bodies: those that the gateway parses, refuses and ignores."""

from pathlib import Path

from gateway.api.anthropic.read import MessageBody, ToolDefinition
from tests.support.documents import explained_names

DOCUMENT = Path(__file__).parents[3] / "docs" / "anthropic.md"


def fields_of(section: str) -> set[str]:
    return explained_names(DOCUMENT.read_text(encoding="utf-8"), section)


def test_every_field_is_in_its_list():
    assert fields_of("Fields") == set(MessageBody.model_fields)
    assert fields_of("Tools") == set(ToolDefinition.model_fields)
    assert fields_of("Refused") == set(MessageBody.harmless)
    assert fields_of("Accepted without effect") == MessageBody.hints
