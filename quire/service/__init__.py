"""What the services share in addition to gRPC: metrics, common flags, and checks that two processes fit together."""
