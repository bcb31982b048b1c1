"""OpenAI's HTTP API, with vLLM's extra fields, over the same generator and validator as gRPC."""
