"""The scheduler as a process: gRPC on both sides of the pure core, and the loop that drives it."""
