"""The scheduler service of one model replica: it owns all bookkeeping of KV blocks and plans every step."""
