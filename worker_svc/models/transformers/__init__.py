"""Models that run through transformers' code, with attention layers that call paged attention."""
