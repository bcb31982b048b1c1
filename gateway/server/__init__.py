"""The HTTP server and the gRPC server: connections, limits, middleware and interceptors."""
