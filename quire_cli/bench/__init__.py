"""`quire bench`: a load generator for Quire over gRPC and for any server with OpenAI's API."""
