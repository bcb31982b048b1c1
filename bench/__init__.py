"""Measurements of Quire itself and in comparison with its peers. None is a test: figures depend on the machine."""
