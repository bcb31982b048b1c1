"""The front ends: OpenAI's, Anthropic's, gRPC and KServe APIs, over the same requests."""
