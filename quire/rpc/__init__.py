"""The common part of all gRPC services of Quire: start, stop, connections and errors."""
