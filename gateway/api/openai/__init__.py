"""OpenAI's API, and what vLLM adds to it."""
