"""The schedulers: one stream to each, which replica takes a request, and their messages as values."""
