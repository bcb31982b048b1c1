"""A request: its values, limits and checks, how it runs and is resumed, and what its answer may hold."""
