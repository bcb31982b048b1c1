"""Formats in which models write reasoning and tool calls, and a parser for each."""
