"""Measurements of Quire against itself and its peers. Nothing here is a test: figures depend on the machine."""
