"""The front ends: the OpenAI, Anthropic, gRPC and KServe APIs, which share one form of requests."""
