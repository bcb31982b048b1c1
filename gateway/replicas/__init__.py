"""Everything between the gateway and its schedulers: one stream to each, live requests, and messages as values."""
