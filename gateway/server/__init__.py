"""The two servers, HTTP and gRPC: connections, limits, and what stands before every call."""
