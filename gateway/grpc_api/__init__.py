"""The gRPC front: quire.gateway.v1."""
