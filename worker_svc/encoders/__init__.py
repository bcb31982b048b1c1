"""Encoders: models that give a vector of a text, and keep nothing in a KV pool."""
