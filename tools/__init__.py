"""Programs that build and check what the repository ships; no service imports them."""
