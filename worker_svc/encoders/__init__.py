"""Models that give vectors or scores of texts: encoders, which keep nothing in a KV pool, and decoders."""
