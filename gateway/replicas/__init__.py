"""The schedulers: one stream to each, the live requests on them, their messages as values."""
