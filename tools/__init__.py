"""Programs that build and check the repository's products; no service imports them."""
