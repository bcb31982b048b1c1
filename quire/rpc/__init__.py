"""Start, stop, connect and fail: what every gRPC service of Quire does the same way."""
