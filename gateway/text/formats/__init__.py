"""How models write reasoning and tool calls in their text: one parser for the answers of all chats."""
