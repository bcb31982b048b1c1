"""A kit for tests of programs that call a model, and of services: servers as child processes, with scripted answers or
with the embedded model, and fixtures for pytest (`quire.testing.plugin`). docs/testing-agents.md explains it."""

from quire.testing.rules import (
    Answer,
    Failure,
    Message,
    Received,
    Rule,
    RuleError,
    ToolCall,
    When,
    context_too_long,
    read_rule_file,
    rule,
)
from quire.testing.server import EmbeddedServer, ScriptedServer, ServerError, free_port

__all__ = [
    "ScriptedServer",
    "EmbeddedServer",
    "ServerError",
    "free_port",
    "Rule",
    "rule",
    "When",
    "Answer",
    "ToolCall",
    "Failure",
    "context_too_long",
    "read_rule_file",
    "RuleError",
    "Received",
    "Message",
]
