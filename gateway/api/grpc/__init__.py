"""The gRPC API: quire.gateway.v1."""
