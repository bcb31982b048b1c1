"""What callers speak: OpenAI's API, gRPC and KServe, over the same requests."""
