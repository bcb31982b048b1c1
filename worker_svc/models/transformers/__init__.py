"""Models that run by the code of transformers, whose attention layers call paged attention."""
